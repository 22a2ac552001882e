# docs/integrations/kubernetes.md describes the image. Both stages need the same base: the compiled libraries are
# cached under the version of its C library.
FROM python:3.13.3-slim-bookworm AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++=4:12.2.0-3 \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/baton
ENV PATH=/opt/baton/bin:$PATH XDG_CACHE_HOME=/opt/baton-cache
WORKDIR /build
COPY constraints.txt ./
COPY locks locks
# The index decides which build of PyTorch this is: PIP_EXTRA_INDEX_URL as a build argument names another one.
ARG PIP_EXTRA_INDEX_URL
RUN pip install --no-cache-dir --no-deps --require-hashes --only-binary :all: --requirement locks/base.txt \
    && pip install --no-cache-dir --constraint constraints.txt torch \
    && sed -e '/--hash=/d' -e 's/ *\\$//' locks/dev.txt > versions.txt \
    && pip install --no-cache-dir --constraint versions.txt huggingface-hub hpack==4.2.0 protobuf==7.36.2
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --no-deps --no-build-isolation . \
    && python -m baton.compute.native.build --all

FROM python:3.13.3-slim-bookworm
COPY --from=build /opt/baton /opt/baton
# Baton loads libraries only from a folder of its own user.
COPY --from=build --chown=10001:10001 /opt/baton-cache /opt/baton-cache
ENV PATH=/opt/baton/bin:$PATH XDG_CACHE_HOME=/opt/baton-cache HOME=/tmp PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 8000 8001 8002
ENTRYPOINT ["baton"]
CMD ["serve", "--host=0.0.0.0"]
