// Long sequences of few heads, cut into segments that run at once. Nothing is left out: a segment maps S before it to S after it,
// and D after it to D before it, affinely, and the two matrices are each other's transpose:
//
//   S_end = M S_begin + N,   D_begin = M^T D_end + N'
//
// since of a chunk's 2^G_last + k^T write (1 + solve beta) fade k and 2^G_last + k^T erase (1 + solve^T beta) left k, with
// write = beta left and erase = beta fade, the one is the other transposed.
//
//   forgetting   where |M| of the tokens just before a segment (for D, just after it) is known to be below 2^-40, the segment's scan
//                starts with those, from 0, and gives nothing out before it reaches its own. One pass.
//   exact        elsewhere: the first segment's S and the last one's D, and beside them N, N' and M of the segments between; the join,
//                in both directions; then the other segments'.
//
// gdn_bwd_cut_kernel chooses for each sequence and head, from lengths and decays, and writes down what each cluster of the scan does.
// Grids and workspace follow from shapes. A segment of either way is longer than what a launch more costs, or nothing is cut.
#pragma once
#include <cstdint>

#include "ops.h"

namespace linattn::cuda::gdn_bwd {

// What a cluster of the scan does: chunks of one sequence and head, in either direction.
struct ScanItem {
    int n, head;        // no item: n = -1
    int begin, chunks;  // of the sequence, walked from either end
    int silent;         // so many steps come first that give nothing out
    int from, to;       // the state at the start; where the state at the end goes: a place, or one of those below
    int to_transposed;  // M goes the other way round to this as well
    bool reverse, no_v;
};
constexpr int kGiven = -1, kNothing = -2;  // the caller's arrays; 0, or nowhere

// What the join does for a sequence and head: slots slot, slot + 2 .. forwards, slot + 1, slot + 3 .. in reverse. A slot is two places,
// a state between two segments, and the M of the segment that it meets.
struct JoinItem {
    int slot, hops;
};

constexpr int kMaxCutSequences = 32;

struct Cut {
    int directions;   // of the scan, in one launch: 2, or 1 where the other is another call's (save = "states")
    int streams = 0;  // clusters of the scan that a head may have at once; 0: nothing is cut
    int room;         // that it may have
    ScanItem *first;  // [HV][room]: of the launch before the join
    ScanItem *later;  // [HV][room]: of that behind it
    JoinItem *join;   // [N][HV]
    float *places;    // [HV][streams / directions][2][2][D][D], V-first; [D][D]: the identity
    __host__ __device__ __forceinline__ int slots_a_head() const { return streams / directions * 2; }
};

}  // namespace linattn::cuda::gdn_bwd
