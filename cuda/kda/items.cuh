// The work of a kda launch, cut on the device from cu_seqlens.
#pragma once
#include "common/sequences.cuh"
#include "shared.cuh"

namespace linattn::cuda::kda {

__device__ __forceinline__ int chunks_of(int length) { return length <= 0 ? 0 : (length - 1) / kChunk + 1; }

__device__ __forceinline__ int chunks_of_sequence(const KernelParams &params, int n) {
    int bos, length;
    sequence_range(params.p, n, bos, length);
    return chunks_of(length);
}

// Sequence of chunk `index` of the call, in the order of the sequences, and its number there; false past the end. By a
// converged warp, the same in every lane.
__device__ __forceinline__ bool find_chunk(const KernelParams &params, int index, int &sequence, int &within) {
    const int N = static_cast<int>(params.p.N), lane = threadIdx.x % 32;
    if (!params.p.cu_seqlens) {
        const int each = chunks_of(static_cast<int>(params.p.T));
        sequence = index / each, within = index % each;
        return sequence < N;
    }
    int before = 0;  // chunks of the sequences before this group of 32
    for (int first = 0; first < N; first += 32) {
        const int count = first + lane < N ? chunks_of_sequence(params, first + lane) : 0;
        int through = count;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, through, step);
            if (lane >= step) through += other;
        }
        const uint32_t beyond = __ballot_sync(~0u, before + through > index);
        if (beyond != 0) {
            const int owner = __ffs(static_cast<int>(beyond)) - 1;
            sequence = first + owner;
            within = index - before - __shfl_sync(~0u, through - count, owner);
            return true;
        }
        before += __shfl_sync(~0u, through, 31);
    }
    return false;
}

// Chunks of a sequence in the slab: numbers first .. end - 1; slot: of chunk `first` in the workspace. By a converged warp.
struct SlabRange {
    int first, end, slot;

    __device__ __forceinline__ SlabRange(const KernelParams &params, int sequence, int length) {
        int before = 0;  // chunks of the sequences before
        if (!params.p.cu_seqlens) {
            before = sequence * chunks_of(length);
        } else {
            for (int n = threadIdx.x % 32; n < sequence; n += 32) before += chunks_of_sequence(params, n);
            before = __reduce_add_sync(~0u, before);
        }
        const int from = params.first_chunk - before, to = from + params.slab_chunks, all = chunks_of(length);
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
