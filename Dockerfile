# Images of Mooncake for Kubernetes, one target each:
#
#   operator     the controller
#   scheduler    the Conductor and its gateway
#   sidecar      beside each engine
#   simulator    simulated engines and store
#   mooncake     scheduler, sidecar and simulator in one: what the operator puts into Pods by default
#
#   docker build --target operator -t mooncake-k8s-operator:0.1.0 .
#
# The base needs Python 3.11 or newer with venv. All images run as user 65532, write nowhere but into mounted volumes
# (a read-only root file system is fine), and install exactly what requirements.lock pins, by hash.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_PROGRESS_BAR=off
WORKDIR /src
RUN python3 -m venv /opt/mooncake
COPY images images
COPY requirements.lock pyproject.toml ./

FROM build AS wheel
COPY . .
RUN python3 -m venv /opt/build \
 && sh images/install.sh /opt/build --build \
 && /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheel .

# Dependencies first, then the wheel: they change less often than the product.
FROM build AS install-operator
RUN sh images/install.sh /opt/mooncake operator
COPY --from=wheel /wheel /wheel
RUN /opt/mooncake/bin/pip install --no-deps --no-index /wheel/*.whl && /opt/mooncake/bin/pip check

FROM build AS install-scheduler
RUN sh images/install.sh /opt/mooncake scheduler
COPY --from=wheel /wheel /wheel
RUN /opt/mooncake/bin/pip install --no-deps --no-index /wheel/*.whl && /opt/mooncake/bin/pip check

FROM build AS install-sidecar
RUN sh images/install.sh /opt/mooncake sidecar
COPY --from=wheel /wheel /wheel
RUN /opt/mooncake/bin/pip install --no-deps --no-index /wheel/*.whl && /opt/mooncake/bin/pip check

FROM build AS install-simulator
RUN sh images/install.sh /opt/mooncake simulator
COPY --from=wheel /wheel /wheel
RUN /opt/mooncake/bin/pip install --no-deps --no-index /wheel/*.whl && /opt/mooncake/bin/pip check

FROM build AS install-mooncake
RUN sh images/install.sh /opt/mooncake scheduler sidecar simulator
COPY --from=wheel /wheel /wheel
RUN /opt/mooncake/bin/pip install --no-deps --no-index /wheel/*.whl && /opt/mooncake/bin/pip check

FROM ${BASE} AS runtime
ENV PATH=/opt/mooncake/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp
USER 65532:65532
WORKDIR /

FROM runtime AS operator
COPY --from=install-operator /opt/mooncake /opt/mooncake
ENTRYPOINT ["python", "-m", "mooncake_operator"]

FROM runtime AS scheduler
COPY --from=install-scheduler /opt/mooncake /opt/mooncake
ENTRYPOINT ["python", "-m", "mooncake_scheduler"]

FROM runtime AS sidecar
COPY --from=install-sidecar /opt/mooncake /opt/mooncake
ENTRYPOINT ["python", "-m", "mooncake_sidecar.engine"]

FROM runtime AS simulator
COPY --from=install-simulator /opt/mooncake /opt/mooncake
ENTRYPOINT ["python", "-m", "mooncake_simulator.engine"]

FROM runtime AS mooncake
COPY --from=install-mooncake /opt/mooncake /opt/mooncake
