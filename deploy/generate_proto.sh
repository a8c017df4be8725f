#!/usr/bin/env bash
# Writes swarm_ft/proto/*_pb2.py[i] from proto/. With --check, fails if what is committed is stale.
set -euo pipefail
cd "$(dirname "$0")/.."
out=.
if [ "${1:-}" = --check ]; then out=$(mktemp -d); trap 'rm -rf "$out"' EXIT; fi
"${PYTHON:-python3}" -m grpc_tools.protoc -I proto --python_out="$out" --pyi_out="$out" \
  proto/swarm_ft/proto/*.proto
if [ "$out" != . ]; then
  for file in "$out"/swarm_ft/proto/*; do
    diff -u "swarm_ft/proto/$(basename "$file")" "$file" || {
      echo "swarm_ft/proto is stale: run 'make proto' and commit" >&2; exit 1; }
  done
fi
