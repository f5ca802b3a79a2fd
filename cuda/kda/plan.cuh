// The items of a launch of the scan, cut on the device from cu_seqlens.
#pragma once
#include "items.cuh"
#include "segments.cuh"

namespace linattn::cuda::kda {

// A piece of the scan: a sequence or a segment of one, a value head and the columns of V of a CTA.
struct Item {
    int sequence, head, batch, piece;
    int bos, length;              // first token, in the row of B, and tokens; 0 for padding
    int cleared;                  // rows of o from bos on that are zero: the tokens of a padding sequence
    int read_row;                 // of the states; -1: padding
    int segment, segments, slot;  // number; how many the sequence has in this slab; place of segment 0 in the workspace
    int segment_chunks;
    bool from_identity;  // M: from the identity, with V = 0
    bool exists;

    __device__ __forceinline__ bool last() const { return segment + 1 >= segments; }  // the sequence's, in this slab
};

// Its chunks: numbers first .. end - 1; slot: of chunk `first` in the workspace. By a converged warp.
struct ItemRange : SlabRange {
    bool continues;  // the sequence comes from the slab before

    __device__ __forceinline__ ItemRange(const KernelParams &params, const Item &item)
        : SlabRange(params, item.sequence, item.length), continues(first > 0) {
        if (item.segments <= 1) return;
        const int from = item.segment * item.segment_chunks;
        first += from, slot += from;
        if (!item.last()) end = first + item.segment_chunks;
    }
};

// How sequences are cut (segments.cuh).
struct Cut {
    int segment_chunks;
    int items_before[kMaxCutSequences],
        slots_before[kMaxCutSequences];  // of the sequences before: items of a head, segments of those that are cut
    int segments[kMaxCutSequences];

    // Sum over the lanes before this one, and over all.
    static __device__ __forceinline__ int sum_before(int x, int &all) {
        int through = x;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, through, step);
            if (static_cast<int>(threadIdx.x % 32) >= step) through += other;
        }
        all = __shfl_sync(~0u, through, 31);
        return through - x;
    }

    // By a converged warp. Returns the items of a head.
    __device__ __forceinline__ int make(const KernelParams &params, bool outputs) {
        constexpr int kEach = kMaxCutSequences / 32;
        const int N = static_cast<int>(params.p.N), lane = threadIdx.x % 32;
        int chunks[kEach], least[kEach], before = 0, longest = 1, sum;  // least: items of a sequence without chunks here
#pragma unroll
        for (int i = 0; i < kEach; i++) {
            const int n = 32 * i + lane, all = n < N ? chunks_of_sequence(params, n) : 0;
            const int from = params.first_chunk - before - sum_before(all, sum), to = from + params.slab_chunks;
            const int first = from < 0 ? 0 : from, end = to < all ? to : all;
            before += sum;
            const bool padding = n < N && read_row(params.p, n) < 0;
            chunks[i] = end > first && !padding ? end - first : 0;
            least[i] = n < N && params.first_chunk == 0 && (padding || all == 0);
            longest = chunks[i] > longest ? chunks[i] : longest;
        }
        longest = __reduce_max_sync(~0u, longest);
        int length = least_segment_chunks(longest), enough = longest;
        while (length < enough) {
            const int middle = (length + enough) / 2;
            int count = 0, transitions = 0;
#pragma unroll
            for (int i = 0; i < kEach; i++) {
                const int s = (chunks[i] + middle - 1) / middle;
                count += s + least[i], transitions += transitions_of(s);
            }
            if (__reduce_add_sync(~0u, count) <= params.cut && __reduce_add_sync(~0u, transitions) <= params.cut)
                enough = middle;
            else
                length = middle + 1;
        }
        length = cut_pays(length, longest) ? length : kUncut;
        int items = 0, slots = 0;
#pragma unroll
        for (int i = 0; i < kEach; i++) {
            const int n = 32 * i + lane, s = chunks[i] == 0 ? least[i] : (chunks[i] - 1) / length + 1;
            segments[n] = s;
            items_before[n] = items + sum_before(outputs ? s : transitions_of(s), sum);
            items += sum;
            slots_before[n] = slots + sum_before(s > 1 ? s : 0, sum);
            slots += sum;
        }
        if (lane == 0) segment_chunks = length;
        return items;
    }

    __device__ __forceinline__ void find(const DeltaParams &p, int index, bool outputs, Item &item) const {
        int n = 0;
        while (n + 1 < static_cast<int>(p.N) && items_before[n + 1] <= index) n++;
        index -= items_before[n];
        item.sequence = n;
        item.segment = outputs ? index : (index + 1) / 2;  // N of the first; then N and M of each
        item.from_identity = !outputs && index > 0 && index % 2 == 0;
        item.segments = segments[n];
        item.segment_chunks = segment_chunks;
        item.slot = slots_before[n];
    }
};

// The items of a launch and the order of the sequences, in shared memory.
struct Plan {
    uint32_t items;
    int lengths[kMaxSorted];
    uint16_t order[kMaxSorted];  // the longest first
    Cut cut;

    __device__ __forceinline__ bool in_order(const KernelParams &params) const {
        return params.p.cu_seqlens && params.p.N <= kMaxSorted && params.cut == 0 && items > gridDim.x;
    }

    // By the whole CTA.
    __device__ __forceinline__ void make(const KernelParams &params, int pieces, bool outputs, int threads) {
        const DeltaParams &p = params.p;
        const int N = static_cast<int>(p.N);
        if (threadIdx.x < 32) {
            const int count = params.cut == 0 ? N : cut.make(params, outputs);
            if (threadIdx.x == 0)
                items = static_cast<uint32_t>(count) * static_cast<uint32_t>(p.HV) * static_cast<uint32_t>(pieces);
        }
        __syncthreads();
        if (!in_order(params)) return;
        for (int n = threadIdx.x; n < N; n += threads) {
            int bos;
            sequence_range(p, n, bos, lengths[n]);
        }
        __syncthreads();
        for (int n = threadIdx.x; n < N; n += threads) {
            int rank = 0;
            for (int m = 0; m < N; m++) rank += lengths[m] > lengths[n] || (lengths[m] == lengths[n] && m < n);
            order[rank] = static_cast<uint16_t>(n);
        }
        __syncthreads();
    }

    // Items come with the longest sequences first, and every second round runs backwards, so that who had a long one gets a
    // short one next.
    __device__ __forceinline__ Item find(const KernelParams &params, int pieces, bool outputs, uint32_t round) const {
        const DeltaParams &p = params.p;
        const uint32_t index = round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
        Item item = {};
        if (round * gridDim.x >= items) return item;
        item.exists = true;
        item.read_row = -1;
        if (index >= items) return item;  // the last round is not full: nothing to do
        const uint32_t HV = static_cast<uint32_t>(p.HV), pair = index / pieces;
        item.piece = index % pieces;
        item.head = pair % HV;
        item.sequence = pair / HV;
        item.segments = 1;
        if (params.cut != 0)
            cut.find(p, item.sequence, outputs, item);
        else if (in_order(params))
            item.sequence = order[item.sequence];
        sequence_range(p, item.sequence, item.bos, item.length);
        item.batch = p.cu_seqlens ? 0 : item.sequence;
        item.read_row = read_row(p, item.sequence);
        if (item.read_row < 0) {
            item.cleared = item.length;
            item.length = 0;
        }
        return item;
    }
};

}  // namespace linattn::cuda::kda
