# Install into a venv what requirements.lock pins for the given extras (or --build), and nothing else.
# Usage: sh images/install.sh VENV EXTRA…
set -eu
venv=$1
shift
python3 images/requirements.py "$@" < requirements.lock > /tmp/requirements.txt
"$venv/bin/pip" install --require-hashes --no-deps --only-binary :all: -r /tmp/requirements.txt
rm /tmp/requirements.txt
