# syntax=docker/dockerfile:1
# The gateway's image, without PyTorch and CUDA. Build from the repository's root:
#   docker build -f deploy/gateway.Dockerfile -t slipstream:gateway .
ARG PYTHON=python:3.12-slim-trixie

FROM ${PYTHON} AS build
# Passed to pip as they are: an index of one's own, a proxy.
ARG PIP_ARGS=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/slipstream/venv
ENV PATH=/opt/slipstream/venv/bin:$PATH
COPY . /src
# A gateway reads the bundled models' tokenizers, not their weights, and downloads and installs nothing later.
# The packages that pyproject.toml names, those of OpenAI's interface and of constraints too, in the versions that the tests run with, but for those that compute.
ARG NOT_INSTALLED="torch|numpy|transformers|safetensors"
RUN python -c "import tomllib; p = tomllib.load(open('/src/pyproject.toml', 'rb'))['project']; \
      extras = p['optional-dependencies']; print(*p['dependencies'], *extras['openai'], *extras['constraints'], sep='\n')" \
      | grep -Ev "^($NOT_INSTALLED)[^a-z-]" > /tmp/needs.txt \
 && pip install $PIP_ARGS --constraint /src/constraints.txt --requirement /tmp/needs.txt \
 && pip install $PIP_ARGS --no-deps /src \
 && ln -s "$(python -c 'from slipstream.bundled import target_dir; print(target_dir().parent)')" /opt/slipstream/bundled \
 && find /opt/slipstream/bundled/ -name '*.safetensors' -delete \
 && pip uninstall --quiet --yes hf-xet setuptools pip

FROM ${PYTHON} AS final
RUN groupadd --gid 10001 slipstream && useradd --uid 10001 --gid 10001 --create-home slipstream \
 && install --directory --mode 0700 --owner 10001 --group 10001 /var/lib/slipstream
COPY --from=build /opt/slipstream /opt/slipstream
ENV PATH=/opt/slipstream/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    GRPC_VERBOSITY=ERROR
USER 10001:10001
WORKDIR /home/slipstream
CMD ["slipstream-gateway", "--help"]
