# One image for every role: docker run swarm-ft COMMAND. Computes on the CPU unless torch finds more.
FROM python:3.11-slim-bookworm

# An index of CPU-only torch builds spares gigabytes of CUDA where the default index has no such
# build: docker build --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL=
# For clients that read Parquet, or datasets of the hub: docker build --build-arg EXTRA=client
ARG EXTRA=
ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

# An unprivileged user; and the places that compose files mount volumes at, which take over
# the owner that the image gives them.
RUN useradd --create-home swarm \
    && install -d -o swarm -g swarm /swarm /model /journal /result /home/swarm/.cache

WORKDIR /app
# Dependencies have a layer of their own, kept until one of these files changes.
COPY pyproject.toml constraints.txt deploy/locked.txt deploy/locked-client.txt ./
RUN python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
        > dependencies.txt \
    && pip install --quiet --no-deps --require-hashes -r locked.txt ${EXTRA:+-r locked-$EXTRA.txt} \
    && pip install --quiet -r dependencies.txt -c constraints.txt \
    && rm dependencies.txt
COPY README.md ./
COPY swarm_ft ./swarm_ft
RUN pip install --quiet --no-deps . && rm -rf build ./*.egg-info

USER swarm
WORKDIR /home/swarm
# Compiles the codecs' loops once, not in every container.
RUN swarm-ft bench codec --codecs q4,q2+z,aq4,aq3+z --shapes 64x64 --repeats 1 > /dev/null
ENTRYPOINT ["swarm-ft"]
CMD ["--help"]
