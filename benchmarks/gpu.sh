#!/usr/bin/env bash
# Measure everything that only a CUDA card can tell, the most valuable first; docs/gpu.md says what comes back.
#
#     benchmarks/gpu.sh DIR [SECONDS]
#
# Run it again with the same DIR to go on where it stopped. SECONDS (570): no stage runs longer than what is left.
# Seconds expected on an H100 with 16 cores: environment 10, core cases 80, workspaces 90, calibration 25,
# promises 1300 and speed 900 (some runs), other cases 270, tests 60. PYTHON names the interpreter (python3).
set -uo pipefail
[ $# -ge 1 ] || { echo "usage: benchmarks/gpu.sh DIR [SECONDS]" >&2; exit 2; }
mkdir -p "$1"
out="$(cd "$1" && pwd)"
limit="${2:-570}"
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PLANNER_DEVICES=/dev/null  # the profiles of this checkout
unset PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF PYTORCH_NO_CUDA_MEMORY_CACHING CUBLAS_WORKSPACE_CONFIG
python="${PYTHON:-python3}"
log="$out/gpu.log"

left() { echo $((limit - SECONDS)); }

# stage NAME MOST COMMAND...: run it for at most MOST seconds and what is left; a failure does not stop the others.
stage() {
    local name="$1" most="$2" seconds began code
    shift 2
    seconds="$(left)"
    [ "$seconds" -gt "$most" ] && seconds="$most"
    if [ "$seconds" -lt 15 ]; then
        echo "== $name: no time left" | tee -a "$log"
        return
    fi
    began="$SECONDS"
    echo "== $name (at most $seconds s)" | tee -a "$log"
    timeout --kill-after=10 "$seconds" "${@//@SECONDS@/$((seconds > 60 ? seconds - 45 : seconds / 2))}" 2>&1 | tee -a "$log"
    code="${PIPESTATUS[0]}"
    echo "== $name: exit code $code after $((SECONDS - began)) s" | tee -a "$log"
}

card="$("$python" -m benchmarks.card.environment --card)" || { echo "the environment is not complete" >&2; exit 2; }
if [ "$card" = generic ] || [ "$card" = unlisted ]; then
    echo "no CUDA card with a profile in profiles/devices is here" >&2
    exit 2
fi
stage environment 60 "$python" -m benchmarks.card.environment
stage "core cases" 240 "$python" -m benchmarks.fidelity --out "$out" --gpu "$card" --core --seconds @SECONDS@
stage workspaces 180 "$python" -m benchmarks.workspaces_gpu --out "$out" --gpu "$card" --seconds @SECONDS@
[ -s "$out/$card.toml" ] || stage calibration 90 "$python" -m planner.profiles.calibrate --out "$out/$card.toml"
stage promises 420 "$python" -m benchmarks.promise --out "$out" --gpu "$card" --seconds @SECONDS@
stage speed 420 "$python" -m benchmarks.speed --out "$out" --gpu "$card" --seconds @SECONDS@
stage "all cases" 480 "$python" -m benchmarks.fidelity --out "$out" --gpu "$card" --seconds @SECONDS@
[ ! -s "$out/promise.jsonl" ] || stage "model of time" 30 "$python" -m benchmarks.times "$out/promise.jsonl"
stage tests 180 "$python" -m pytest -p no:cacheprovider tests/gpu
echo "done after $SECONDS s; $(cat "$out/fidelity.jsonl" 2>/dev/null | wc -l) rows in fidelity.jsonl" | tee -a "$log"
