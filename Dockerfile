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
# (a read-only root file system is fine), and install exactly what requirements.lock pins, by hash. What they depend
# on and the product are layers of their own: the first is large and seldom changes.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_PROGRESS_BAR=off
WORKDIR /src
RUN python3 -m venv /opt/mooncake
COPY images images
COPY requirements.lock pyproject.toml ./

FROM build AS wheel
RUN python3 -m venv /opt/build && sh images/install.sh /opt/build --build
COPY . .
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheel .

FROM build AS operator-dependencies
RUN sh images/install.sh /opt/mooncake operator

FROM build AS scheduler-dependencies
RUN sh images/install.sh /opt/mooncake scheduler

FROM build AS sidecar-dependencies
RUN sh images/install.sh /opt/mooncake sidecar

FROM build AS simulator-dependencies
RUN sh images/install.sh /opt/mooncake simulator

FROM build AS mooncake-dependencies
RUN sh images/install.sh /opt/mooncake scheduler sidecar simulator

FROM ${BASE} AS runtime
ENV PATH=/opt/mooncake/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
WORKDIR /

FROM runtime AS operator
COPY --from=operator-dependencies /opt/mooncake /opt/mooncake
COPY --from=wheel /wheel /tmp/wheel
RUN pip install --no-cache-dir --no-deps --no-index /tmp/wheel/*.whl && pip check && rm -r /tmp/wheel
USER 65532:65532
ENTRYPOINT ["python", "-m", "mooncake_operator"]

FROM runtime AS scheduler
COPY --from=scheduler-dependencies /opt/mooncake /opt/mooncake
COPY --from=wheel /wheel /tmp/wheel
RUN pip install --no-cache-dir --no-deps --no-index /tmp/wheel/*.whl && pip check && rm -r /tmp/wheel
USER 65532:65532
ENTRYPOINT ["python", "-m", "mooncake_scheduler"]

FROM runtime AS sidecar
COPY --from=sidecar-dependencies /opt/mooncake /opt/mooncake
COPY --from=wheel /wheel /tmp/wheel
RUN pip install --no-cache-dir --no-deps --no-index /tmp/wheel/*.whl && pip check && rm -r /tmp/wheel
USER 65532:65532
ENTRYPOINT ["python", "-m", "mooncake_sidecar.engine"]

FROM runtime AS simulator
COPY --from=simulator-dependencies /opt/mooncake /opt/mooncake
COPY --from=wheel /wheel /tmp/wheel
RUN pip install --no-cache-dir --no-deps --no-index /tmp/wheel/*.whl && pip check && rm -r /tmp/wheel
USER 65532:65532
ENTRYPOINT ["python", "-m", "mooncake_simulator.engine"]

FROM runtime AS mooncake
COPY --from=mooncake-dependencies /opt/mooncake /opt/mooncake
COPY --from=wheel /wheel /tmp/wheel
RUN pip install --no-cache-dir --no-deps --no-index /tmp/wheel/*.whl && pip check && rm -r /tmp/wheel
USER 65532:65532
