#!/usr/bin/env bash
# All that a GPU has to show, in some seven minutes on a machine with 16 cores: bash tests/gpu.sh [folder for the logs]
#
# Needs pytest-xdist. Environment:
#
#   PYLINATTN_LIBRARY          the library under test; without it the installed one
#   PYLINATTN_RACECHECK        one built with -DLINATTN_EVERY_LANE_ARRIVES, for racecheck (see tests/sanitize.py); else that is left out
#   PYLINATTN_PARTS            the parts library, where there is no nvcc (see tests/gpu_parts/build.py)
#   PYLINATTN_TEST_PROCESSES   at once, 8 if not given
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
logs=${1:-$(mktemp -d)}
mkdir -p "$logs"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYLINATTN_REQUIRE_GPU=1
failed=0

step() { # step name seconds command...: the command's last line, and the tests that failed
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    timeout "$limit" "$@" >"$logs/$name.log" 2>&1
    status=$?
    [ $status -eq 0 ] || failed=1
    printf '%-10s status %d, %3d s: %s\n' "$name" $status $((SECONDS - start)) "$(tail -n 1 "$logs/$name.log" | cut -c 1-100)"
    grep -E '^(FAILED|ERROR) ' "$logs/$name.log" | cut -c 1-160
}

many=(python3 -m pytest -q -p no:cacheprovider -n "${PYLINATTN_TEST_PROCESSES:-8}")
alone=tests/test_gpu_matrix.py::test_ten_thousand_calls_keep_memory_flat
step parts 120 "${many[@]}" tests/gpu_parts
step suite 500 "${many[@]}" -m gpu tests --ignore tests/test_gpu_fla.py --deselect $alone
step flat 60 python3 -m pytest -q -p no:cacheprovider $alone
for tool in synccheck initcheck memcheck; do
    step $tool 60 compute-sanitizer --tool $tool --error-exitcode 1 python3 tests/sanitize.py
done
if [ -n "${PYLINATTN_RACECHECK:-}" ]; then
    step racecheck 200 env PYLINATTN_LIBRARY="$PYLINATTN_RACECHECK" \
        compute-sanitizer --tool racecheck --error-exitcode 1 python3 tests/sanitize.py
fi
if python3 -c "import fla" 2>/dev/null; then
    step fla 300 "${many[@]}" --durations=5 tests/test_gpu_fla.py
fi
echo "logs in $logs"
exit $failed
