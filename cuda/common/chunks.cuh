// From a chunk's number to its tokens, for dense batches and packed sequences. The device cuts the work: lengths are read from
// cu_seqlens in the kernel, so a captured graph follows new contents. PTX-free.
#pragma once
#include <cstdint>

namespace linattn::cuda {

// N sequences. Dense: cu_seqlens null, sequence n is row n of [N, T]. Packed: all in one row of T tokens.
struct Sequences {
    const void *cu_seqlens = nullptr;  // [N+1] int32 or int64; may be null
    bool is_int64 = false;
    int64_t N = 0;
    int64_t T = 0;
};

// First token and end of a sequence, counted over all tokens.
struct TokenRange {
    int64_t bos, eos;
};

// Values are clamped to [0,T], and eos to bos at least, so that no contents of cu_seqlens lead outside the tensors.
__device__ __forceinline__ int64_t clamped_bound(const Sequences &s, int64_t n) {
    const int64_t value =
        s.is_int64 ? static_cast<const int64_t *>(s.cu_seqlens)[n] : static_cast<const int32_t *>(s.cu_seqlens)[n];
    return value < 0 ? 0 : value > s.T ? s.T : value;
}

__device__ __forceinline__ TokenRange token_range(const Sequences &s, int64_t n) {
    if (s.cu_seqlens == nullptr) return {n * s.T, (n + 1) * s.T};
    const int64_t bos = clamped_bound(s, n), eos = clamped_bound(s, n + 1);
    return {bos, eos < bos ? bos : eos};
}

// Tokens [start, start + length) of sequence i_n, its chunk number i_c. length 0: there is no such chunk.
struct Chunk {
    int64_t i_n, i_c, start;
    int length;
};

// How many chunks of kChunk tokens N sequences can have at most: sum of ceil(len/kChunk) <= floor((T + N (kChunk-1)) / kChunk).
// What the grid of a packed call is sized by.
template <int kChunk>
constexpr int64_t max_chunks(bool packed, int64_t N, int64_t T) {
    return packed ? (T + N * (kChunk - 1)) / kChunk : N * ((T + kChunk - 1) / kChunk);
}

// Chunk `index` in the order of the sequences. Executed by a converged warp, the same index in every lane; the result is the
// same in every lane. Packed: a scan of N/32 steps over cu_seqlens.
template <int kChunk>
__device__ __forceinline__ Chunk find_chunk(const Sequences &s, int64_t index) {
    int64_t i_n = s.N, i_c = 0;
    if (s.cu_seqlens == nullptr) {
        const int64_t per_sequence = (s.T + kChunk - 1) / kChunk;
        if (per_sequence > 0) {
            i_n = index / per_sequence;
            i_c = index % per_sequence;
        }
    } else {
        const int lane = threadIdx.x % 32;
        int64_t before = 0;  // chunks of the sequences before this group of 32
        for (int64_t first = 0; first < s.N; first += 32) {
            int64_t count = 0;
            if (first + lane < s.N) {
                const TokenRange r = token_range(s, first + lane);
                count = (r.eos - r.bos + kChunk - 1) / kChunk;
            }
            int64_t through = count;  // inclusive prefix sum over the lanes
            for (int step = 1; step < 32; step *= 2) {
                const int64_t other = __shfl_up_sync(~0u, through, step);
                if (lane >= step) through += other;
            }
            const uint32_t beyond = __ballot_sync(~0u, before + through > index);
            if (beyond != 0) {
                const int owner = __ffs(static_cast<int>(beyond)) - 1;
                i_n = first + owner;
                i_c = index - before - __shfl_sync(~0u, through - count, owner);
                break;
            }
            before += __shfl_sync(~0u, through, 31);
        }
    }
    if (i_n >= s.N) return {s.N, 0, 0, 0};
    const TokenRange r = token_range(s, i_n);
    const int64_t start = r.bos + i_c * kChunk, left = r.eos - start;
    return {i_n, i_c, start, static_cast<int>(left < kChunk ? left : kChunk)};
}

}  // namespace linattn::cuda
