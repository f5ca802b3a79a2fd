#!/usr/bin/env bash
# Every result file of a GPU, one after the other, since times are only true on a quiet card: bash bench/all.sh [folder for the logs]
#
# Ours and the peers that are importable (README.md). What compiles longest comes last, and a part that runs out of time keeps the
# rows it has. Environment:
#
#   BENCH_PARTS                which, by name; all if not given
#   PYLINATTN_LIBRARY          the library to time; without it the installed one
#   LINATTN_COMMIT, LINATTN_CUDA_TREE   where git cannot say them
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
logs=${1:-$(mktemp -d)}
mkdir -p "$logs"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
failed=0

part() { # part name seconds command...
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    [[ " ${BENCH_PARTS:-$name} " == *" $name "* ]] || return
    timeout --signal INT --kill-after 10 "$limit" python3 "$@" >"$logs/$name.log" 2>&1
    status=$?
    [ $status -eq 0 ] || failed=1
    printf '%-13s status %3d, %3d s: %s\n' "$name" $status $((SECONDS - start)) "$(tail -n 1 "$logs/$name.log" | cut -c 1-100)"
}

rows() { # rows name seconds options...: bench.py stops by itself, with what it has
    local name=$1 limit=$2
    shift 2
    part "$name" $((limit + 60)) bench/bench.py --time-budget "$limit" "$@"
}

rows gdn_fwd 240 --ops gdn_fwd --impl pylinattn,flashinfer,flashinfer_cp,flash_qla
rows kda_fwd 180 --ops kda_fwd --impl pylinattn,cudnn
rows decode 180 --ops gdn_decode,kda_decode
rows kda_verify 240 --ops kda_verify
rows gdn_verify 240 --ops gdn_verify
part drift 120 bench/drift.py
part host_cost 120 bench/host_cost.py --device cuda
part host_ways 120 bench/host_ways.py --device cuda
part bwd 400 bench/backward.py --peer 4/8,2/4,16/64,16/32 # ours first
rows kda_fwd_fla 400 --ops kda_fwd # once more: ratios are taken between rows of one process
echo "logs in $logs"
exit $failed
