// Long sequences of few heads, cut exactly into segments (host and device).
//
// A segment maps the state before it affinely, S -> M S + N. One launch computes the first segments' outputs and, beside them,
// N (from zero) and M (from the identity, with V = 0) of the middle ones; the last one's are not needed. kda_fwd_join_kernel
// hands the states through; a second launch then computes the other segments' outputs. Outputs have 64 columns of V a CTA,
// transitions all of them: that is as many segments as multiprocessors allow. Nothing depends on the values of the gates.
//
// What is cut are the chunks that a slab has of a sequence. The host decides from shapes whether to try; how long a segment is
// every kernel finds out for itself from cu_seqlens, with the same result.
#pragma once
#include <cmath>

#include "shared.cuh"

namespace linattn::cuda::kda {

constexpr int kMaxCutSequences = 64;
constexpr int kUncut = INT32_MAX / 2;

// Of a sequence with so many chunks.
constexpr __host__ __device__ __forceinline__ int segments_of(int chunks, int segment_chunks) {
    return (chunks - 1) / segment_chunks + 1;
}

constexpr __host__ __device__ __forceinline__ int middles_of(int segments) { return segments > 2 ? segments - 2 : 0; }

// In 1/25 of what a chunk takes uncut in a CTA of 64 columns, 0.8 us: a chunk in a CTA of 128; cut, transition and outputs of a
// chunk, a hop of the states, the launches.
constexpr int kUncutCost = 25, kWideCost = 42, kChunkCost = 54, kHopCost = 37, kLaunchCost = 590;

constexpr __host__ __device__ __forceinline__ bool cut_pays(int segment_chunks, int longest) {
    return int64_t{kChunkCost} * segment_chunks + kHopCost * ((longest - 1) / segment_chunks) + kLaunchCost <
           int64_t{kUncutCost} * longest;
}

// Segments shorter than this cost more in hops than they save.
__host__ __device__ __forceinline__ int least_segment_chunks(int longest) {
    const int near = static_cast<int>(sqrtf(static_cast<float>(longest) * kHopCost / kChunkCost)) - 2;
    int least = near > 1 ? near : 1;
    while (int64_t{kChunkCost} * least * least < int64_t{kHopCost} * longest) least++;
    return least;
}

}  // namespace linattn::cuda::kda
