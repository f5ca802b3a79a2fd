#!/usr/bin/env bash
# All that a GPU has to show, in some two minutes with 14 processes on 32 cores: bash tests/gpu.sh [folder for the logs]
#
# Needs pytest-xdist. Environment:
#
#   PYLINATTN_LIBRARY          the library under test, a file called liblinattn.so: a C program links to it; without it the installed one
#   PYLINATTN_RACECHECK        one built with -DLINATTN_EVERY_LANE_ARRIVES, for racecheck (see tests/sanitize.py); else that is left out
#   PYLINATTN_PARTS            the parts library, where there is no nvcc (see tests/gpu_parts/build.py)
#   PYLINATTN_TEST_PROCESSES   at once, 8 if not given
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
logs=${1:-$(mktemp -d)}
mkdir -p "$logs"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYLINATTN_REQUIRE_GPU=1
export OMP_NUM_THREADS=1 LINATTN_NUM_THREADS=1 # the processes are many enough
failed=0

step() { # step name seconds command...: the command's last line, and the tests that failed
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    timeout "$limit" "$@" >"$logs/$name.log" 2>&1
    status=$?
    [ $status -eq 0 ] || failed=1
    printf '%-21s status %d, %3d s: %s\n' "$name" $status $((SECONDS - start)) "$(tail -n 1 "$logs/$name.log" | cut -c 1-100)"
    grep -E '^(FAILED|ERROR) ' "$logs/$name.log" | cut -c 1-160
}

many=(python3 -m pytest -q -p no:cacheprovider --dist loadgroup -n "${PYLINATTN_TEST_PROCESSES:-8}")
alone=( # they skip themselves beside others
    tests/test_gpu_matrix.py::test_ten_thousand_calls_keep_memory_flat
    tests/test_gpu.py::test_no_synchronisation_and_no_growing_memory
    tests/test_gpu_limits.py::test_host_time_does_not_depend_on_new_lengths
)
sanitizers() { # beside the suite: each takes one core
    for tool in synccheck initcheck memcheck; do
        step $tool 180 compute-sanitizer --tool $tool --error-exitcode 1 python3 tests/sanitize.py
    done
    return $failed
}

racecheck() { # the slowest, so it goes in parts, each a process
    step "race-$1" 400 env PYLINATTN_LIBRARY="$PYLINATTN_RACECHECK" \
        compute-sanitizer --tool racecheck --error-exitcode 1 python3 tests/sanitize.py --once "$1"
    return $failed
}

against_fla() { # a process for each test of gradients, whose kernels FLA compiles for a minute
    local these=(python3 -m pytest -q -p no:cacheprovider --durations=5 tests/test_gpu_fla.py)
    step fla-gradients 500 "${these[@]}" -n 10 -k test_gradients
    step fla 300 "${these[@]}" -n 10 -k "not test_gradients"
    return $failed
}

step parts 120 "${many[@]}" tests/gpu_parts
sanitizers >"$logs/sanitizers.log" &
beside=($!)
if python3 -c "import fla" 2>/dev/null; then
    against_fla >"$logs/against_fla.log" &
    beside+=($!)
fi
step suite 500 "${many[@]}" -m gpu tests --ignore tests/test_gpu_fla.py
for process in "${beside[@]}"; do wait "$process" || failed=1; done
if [ -n "${PYLINATTN_RACECHECK:-}" ]; then # not beside the suite: there it did not end in 400 s, alone 14 of 16 parts took 64 to 202
    beside=()
    for part in {gdn,kda}-{128,64}-{bfloat16,float16}-{K,V}; do
        racecheck "$part" >"$logs/race-$part.out" &
        beside+=($!)
    done
    for process in "${beside[@]}"; do wait "$process" || failed=1; done
fi
cat "$logs/sanitizers.log" "$logs"/race-*.out 2>/dev/null
[ -e "$logs/against_fla.log" ] && cat "$logs/against_fla.log"
step alone 60 python3 -m pytest -q -p no:cacheprovider "${alone[@]}"
echo "logs in $logs"
exit $failed
