// The work of a kda launch, cut on the device from cu_seqlens.
#pragma once
#include "common/sequences.cuh"
#include "shared.cuh"

namespace linattn::cuda::kda {

__device__ __forceinline__ int chunks_of(int length) { return length <= 0 ? 0 : (length - 1) / kChunk + 1; }

// Chunks of a call are counted through its sequences, n's from here on: at least as far apart as it has chunks, without a sum
// over the sequences before it.
__device__ __forceinline__ int first_chunk_of(const KernelParams &params, int n, int bos, int length) {
    return params.p.cu_seqlens ? bos / kChunk + n : n * chunks_of(length);
}

// A sequence, and which of its chunks.
struct ChunkPlace {
    int sequence, bos, length, within;
};

// Of chunk `index` of the call; false where there is none. By a converged warp, the same in every lane.
__device__ __forceinline__ bool find_chunk(const KernelParams &params, int index, ChunkPlace &place) {
    const int N = static_cast<int>(params.p.N), lane = threadIdx.x % 32;
    if (!params.p.cu_seqlens) {
        place.bos = 0, place.length = static_cast<int>(params.p.T);
        const int each = chunks_of(place.length);
        place.sequence = index / each, place.within = index % each;
        return place.sequence < N;
    }
    int first = 0, count = N;  // it is one of these sequences; 32 of them are looked at in a round
    while (true) {
        const int step = (count + 31) / 32, n = first + lane * step;
        const bool there = n < first + count;
        const int bos = there ? sequence_start(params.p, n) : 0, end = there ? sequence_start(params.p, n + 1) : 0;
        const int owner = __popc(__ballot_sync(~0u, there && first_chunk_of(params, n, bos, 0) <= index)) - 1;
        if (owner < 0) return false;
        const int left = first + count - (first + owner * step);
        first += owner * step, count = left < step ? left : step;
        if (step > 1) continue;
        place.sequence = first;
        place.bos = __shfl_sync(~0u, bos, owner);
        place.length = __shfl_sync(~0u, end, owner) - place.bos;
        place.within = index - first_chunk_of(params, first, place.bos, 0);
        return place.within < chunks_of(place.length);
    }
}

// Chunks of a sequence in the slab: numbers first .. end - 1; slot: of chunk `first` in the workspace.
struct SlabRange {
    int first, end, slot;

    __device__ __forceinline__ SlabRange(const KernelParams &params, int sequence, int bos, int length) {
        const int from = params.first_chunk - first_chunk_of(params, sequence, bos, length), to = from + params.slab_chunks;
        const int all = chunks_of(length);
        first = from < 0 ? 0 : from;
        end = to < all ? to : all;
        slot = first - from;
    }
};

template <int D>
__device__ __forceinline__ Operands<D> *operands_of(const KernelParams &params, int chunk, int head) {
    return reinterpret_cast<Operands<D> *>(params.g_operands) + (int64_t{chunk} * params.p.HV + head);
}

}  // namespace linattn::cuda::kda
