#!/bin/sh
# What the image runs: training, in the folder of the repository (Apptainer's `run` does not enter it), behind
# the entrypoint of NVIDIA's base image, which checks the driver and finds CUDA's compatibility libraries.
cd /workspace/megafp8 || exit 2
base=/opt/nvidia/nvidia_entrypoint.sh
[ ! -x "$base" ] || exec "$base" python3 pretrain_gpt.py "$@"
exec python3 pretrain_gpt.py "$@"
