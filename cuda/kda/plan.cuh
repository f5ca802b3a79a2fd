// The items of a launch of the scan over whole sequences, cut on the device from cu_seqlens.
#pragma once
#include "cut.cuh"

namespace linattn::cuda::kda {

// The items of a launch and the order of the sequences, in shared memory.
struct Plan {
    uint32_t items, ctas;        // gridDim.x, where it takes no register
    int chunks[kMaxSorted];      // of a sequence, in this slab; -1: nothing to do
    uint16_t order[kMaxSorted];  // the longest first
    int present;                 // sequences with something to do, if they are sorted, or all
    bool is_sorted;              // sequences are taken in `order`
    bool halves;                 // of whole sequences: 64 columns of V a CTA

    // Item of a CTA in a round over the grid: the longest first, and every second round backwards, so that who had a long one
    // gets a short one next.
    __device__ __forceinline__ uint32_t place(uint32_t round, uint32_t cta) const {
        return round * ctas + (round % 2 == 0 ? cta : ctas - 1 - cta);
    }

    // By the whole CTA. pieces: CTAs of a sequence and head.
    __device__ __forceinline__ void make(const KernelParams &params, int pieces, int threads) {
        const uint32_t each = static_cast<uint32_t>(params.p.HV) * static_cast<uint32_t>(pieces);
        sort(params, static_cast<uint32_t>(params.p.N) * each > gridDim.x, threads);
        if (threadIdx.x == 0) items = static_cast<uint32_t>(present) * each;
        __syncthreads();
    }

    // The same with V in one CTA or two, whichever ends first. Where not even one CTA each fits, one.
    __device__ __forceinline__ void make_whole(const KernelParams &params, int threads) {
        sort(params, true, threads);
        if (threadIdx.x < 32) {
            const uint32_t pairs = static_cast<uint32_t>(present) * static_cast<uint32_t>(params.p.HV);
            const bool two =
                is_sorted && pairs <= ctas && kUncutCost * longest_share(params) < int64_t{kWideCost} * chunks[order[0]];
            if (threadIdx.x == 0) items = two ? 2 * pairs : pairs, halves = two;
        }
        __syncthreads();
    }

    // Chunks of the CTA that has most of them, with V in two. By a converged warp.
    __device__ __forceinline__ int64_t longest_share(const KernelParams &params) const {
        const uint32_t HV = static_cast<uint32_t>(params.p.HV), all = 2 * static_cast<uint32_t>(present) * HV;
        int most = 0;
        for (uint32_t cta = threadIdx.x; cta < ctas; cta += 32) {
            int own = 0;
            for (uint32_t round = 0; round * ctas < all; round++) {
                const uint32_t index = place(round, cta);
                if (index < all) own += chunks[order[index / 2 / HV]];
            }
            most = own > most ? own : most;
        }
        return __reduce_max_sync(~0u, most);
    }

    __device__ __forceinline__ void sort(const KernelParams &params, bool wanted, int threads) {
        const DeltaParams &p = params.p;
        const int N = static_cast<int>(p.N);
        wanted = wanted && p.cu_seqlens && N <= kMaxSorted;
        if (threadIdx.x == 0) is_sorted = wanted, ctas = gridDim.x, present = N;
        __syncthreads();
        if (!wanted) return;
        for (int n = threadIdx.x; n < N; n += threads) {
            int bos, length;
            sequence_range(p, n, bos, length);
            const SlabRange range(params, n, bos, length);
            const bool padding = read_row(p, n) < 0, here = !padding && range.first < range.end;
            const bool first = params.first_chunk == 0 && (padding || length == 0);  // outputs to clear, a state to hand on
            chunks[n] = here ? range.end - range.first : first ? 0 : -1;
        }
        __syncthreads();
        for (int n = threadIdx.x; n < N; n += threads) {
            int rank = 0, there = 0;
            for (int m = 0; m < N; m++) {
                rank += chunks[m] > chunks[n] || (chunks[m] == chunks[n] && m < n);
                there += chunks[m] >= 0;
            }
            order[rank] = static_cast<uint16_t>(n);
            if (n == 0) present = there;
        }
        __syncthreads();
    }

    // By a converged warp, to the warp's item: one lane stores, after all have read the one before.
    __device__ __forceinline__ void find(Item &to, const KernelParams &params, int pieces, uint32_t round) const {
        const Item item = found(params, pieces, round);
        __syncwarp();
        if (threadIdx.x % 32 == 0) to = item;
        __syncwarp();
    }

    __device__ __forceinline__ Item found(const KernelParams &params, int pieces, uint32_t round) const {
        Item item = {};
        const uint32_t index = place(round, blockIdx.x);
        item.exists = round * ctas < items;
        if (index >= items) {  // the last round is not full: nothing to do
            item.read_row = -1;
            return item;
        }
        const uint32_t HV = static_cast<uint32_t>(params.p.HV), pair = index / static_cast<uint32_t>(pieces);
        item.piece = index % static_cast<uint32_t>(pieces);
        item.head = pair % HV;
        item.segments = 1;
        item.of_sequence(params, is_sorted ? order[pair / HV] : static_cast<int>(pair / HV));
        return item;
    }
};

}  // namespace linattn::cuda::kda
