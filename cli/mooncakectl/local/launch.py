"""Becomes the program it is given, after tying its life to the runtime's. Run as a file, not imported.

A `preexec_fn` would do the same inside the runtime, but runs Python between fork and exec, which is not safe
once the runtime has threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


def main() -> None:
    """`launch.py RUNTIME_PID PROGRAM [ARG …]`."""
    runtime, argv = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != runtime:
        sys.exit(1)  # It died before the kernel knew of the tie.
    # Python ignores these, and what is ignored stays so across exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"cannot start {argv[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)


if __name__ == "__main__":
    main()
