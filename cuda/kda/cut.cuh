// What a CTA of the scan does, and how sequences are cut into segments (segments.cuh).
//
// The preparation finds that out in CTAs of its own, beside its chunks, and leaves it in the workspace: CTAs of the launches
// behind it begin one after another, when an SM is free, and what they would have to look up, all others would wait for.
#pragma once
#include <cstddef>

#include "items.cuh"
#include "segments.cuh"

namespace linattn::cuda::kda {

// A launch of the scan: all of the sequences; where they are cut, first segments and transitions; the other segments.
enum class Pass { Whole, First, Later };

// A piece of the scan: a sequence or a segment of one, a value head and the columns of V of a CTA.
struct Item {
    int sequence, head, batch, piece;
    int bos, length;              // first token, in the row of B, and tokens; 0 for padding
    int cleared;                  // rows of o from bos on that are zero: the tokens of a padding sequence
    int read_row;                 // of the states; -1: padding
    int segment, segments, slot;  // number; how many the sequence has in this slab; place of segment 1 in the workspace
    int segment_chunks;
    int transition;     // without outputs
    int from_identity;  // M: from the identity, with V = 0
    int exists;

    __device__ __forceinline__ void of_sequence(const KernelParams &params, int n) {
        sequence_range(params.p, n, bos, length);
        sequence = n, batch = params.p.cu_seqlens ? 0 : n;
        read_row = cuda::read_row(params.p, n);
        cleared = read_row < 0 ? length : 0;
        if (read_row < 0) length = 0;
        exists = true;
    }
    __device__ __forceinline__ bool last() const { return segment + 1 >= segments; }  // the sequence's, in this slab
};

// Its chunks: numbers first .. end - 1; slot: of chunk `first` in the workspace.
struct ItemRange : SlabRange {
    bool continues;  // the sequence comes from the slab before

    __device__ __forceinline__ ItemRange(const KernelParams &params, const Item &item)
        : SlabRange(params, item.sequence, item.bos, item.length), continues(first > 0) {
        if (item.segments <= 1) return;
        const int from = item.segment * item.segment_chunks;
        first += from, slot += from;
        if (!item.last()) end = first + item.segment_chunks;
    }
};

// How sequences are cut (segments.cuh).
struct Cut {
    int segment_chunks;
    int segments[kMaxCutSequences];  // of each sequence, in this slab; 0: nothing to do
    int count[3];                    // of all sequences: first, middle, later segments

    // By a converged warp.
    __device__ __forceinline__ void make(const KernelParams &params) {
        constexpr int kEach = kMaxCutSequences / 32;
        const int N = static_cast<int>(params.p.N), lane = threadIdx.x % 32, pieces = static_cast<int>(params.p.V) / 64;
        int chunks[kEach], least[kEach], longest = 1;  // least: segments of a sequence without chunks here
#pragma unroll
        for (int i = 0; i < kEach; i++) {
            const int n = 32 * i + lane;
            int bos = 0, tokens = 0;
            if (n < N) sequence_range(params.p, n, bos, tokens);
            const SlabRange range(params, n, bos, tokens);
            const int all = chunks_of(tokens), first = range.first, end = range.end;
            const bool padding = n < N && read_row(params.p, n) < 0;
            chunks[i] = end > first && !padding ? end - first : 0;
            least[i] = n < N && params.first_chunk == 0 && (padding || all == 0);
            longest = chunks[i] > longest ? chunks[i] : longest;
        }
        longest = __reduce_max_sync(~0u, longest);
        const auto segments_in = [&](int i, int length) { return chunks[i] == 0 ? least[i] : segments_of(chunks[i], length); };
        int length = least_segment_chunks(longest), enough = longest;
        if (N == 1) {  // without a search
            const int early = (params.cut - pieces) / 2 + 2, late = params.cut / pieces + 1;
            const int shortest = segments_of(longest, early < late ? early : late);
            length = enough = length > shortest ? length : shortest;
        }
        while (length < enough) {
            const int middle = (length + enough) / 2;
            int early = 0, late = 0;  // CTAs of a head
#pragma unroll
            for (int i = 0; i < kEach; i++) {
                const int s = segments_in(i, middle);
                early += (s > 0 ? pieces : 0) + 2 * middles_of(s), late += s > 1 ? pieces * (s - 1) : 0;
            }
            if (__reduce_add_sync(~0u, early) <= params.cut && __reduce_add_sync(~0u, late) <= params.cut)
                enough = middle;
            else
                length = middle + 1;
        }
        length = cut_pays(length, longest) ? length : kUncut;
        int firsts = 0, middles = 0, laters = 0;
#pragma unroll
        for (int i = 0; i < kEach; i++) {
            const int s = segments_in(i, length);
            segments[32 * i + lane] = s;
            firsts += s > 0, middles += middles_of(s), laters += s > 1 ? s - 1 : 0;
        }
        firsts = __reduce_add_sync(~0u, firsts), middles = __reduce_add_sync(~0u, middles);
        laters = __reduce_add_sync(~0u, laters);
        if (lane == 0) segment_chunks = length, count[0] = firsts, count[1] = middles, count[2] = laters;
        __syncwarp();
    }

    // The index-th first, middle or later segment, which there is. Returns its sequence.
    __device__ __forceinline__ int find(int index, bool first, bool middle, Item &item) const {
        int n = 0, slot = 0;
        for (;; n++) {
            const int s = segments[n], here = first ? s > 0 : middle ? middles_of(s) : s > 1 ? s - 1 : 0;
            if (index < here) break;
            index -= here;
            slot += s > 1 ? s - 1 : 0;
        }
        item.segment = first ? 0 : index + 1;
        item.segments = segments[n];
        item.segment_chunks = segment_chunks;
        item.slot = slot;
        return n;
    }

    // Of a CTA of a launch. First segments come first, then N and M of the middle ones.
    __device__ __forceinline__ Item item(const KernelParams &params, Pass pass, uint32_t cta) const {
        const uint32_t HV = static_cast<uint32_t>(params.p.HV), columns = static_cast<uint32_t>(params.p.V) / 64;
        const uint32_t outputs = HV * columns * static_cast<uint32_t>(count[pass == Pass::First ? 0 : 2]);
        const uint32_t all = outputs + (pass == Pass::First ? 2 * HV * static_cast<uint32_t>(count[1]) : 0);
        Item item = {};
        if (cta >= all) return item;
        const bool transition = cta >= outputs;
        const uint32_t index = transition ? cta - outputs : cta, pieces = transition ? 2 : columns;
        const uint32_t pair = index / pieces, piece = index % pieces;
        item.transition = transition;
        item.piece = transition ? 0 : static_cast<int>(piece);
        item.from_identity = transition && piece != 0;
        item.head = pair % HV;
        item.of_sequence(params, find(pair / HV, pass == Pass::First && !transition, transition, item));
        return item;
    }
};

__device__ __forceinline__ Item *planned_items(const KernelParams &params, Pass pass) {
    return static_cast<Item *>(params.g_items) + (pass == Pass::Later ? params.cut * params.p.HV : 0);
}

// By a CTA for each value head, whose shared memory holds `cut`. Not inlined: the preparation's own code stays together.
inline __device__ __noinline__ void plan_cut(Cut &cut, const KernelParams &params) {
    if (threadIdx.x < 32) cut.make(params);
    __syncthreads();
    const int N = static_cast<int>(params.p.N), ctas = params.cut * static_cast<int>(params.p.HV);
    for (int i = threadIdx.x; i < 2 * params.cut; i += blockDim.x) {
        const Pass pass = i < params.cut ? Pass::First : Pass::Later;
        const int cta = i % params.cut * gridDim.x + blockIdx.x;
        if (cta < ctas) planned_items(params, pass)[cta] = cut.item(params, pass, static_cast<uint32_t>(cta));
    }
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    for (int n = 0, slot = 0; n < N; n++) {
        const int segments = cut.segments[n];
        params.g_joins[n] = {slot, segments - 2};
        slot += segments > 1 ? segments - 1 : 0;
    }
}

constexpr int kItemWords = sizeof(Item) / 4;
static_assert(kItemWords <= 32, "a word a lane");

// A lane's word of the CTA's item, and the whole of it to a warp's own place; by a converged warp.
__device__ __forceinline__ int planned_word(const KernelParams &params, Pass pass) {
    const int lane = threadIdx.x % 32;
    return lane < kItemWords ? reinterpret_cast<const int *>(&planned_items(params, pass)[blockIdx.x])[lane] : 0;
}
__device__ __forceinline__ void load_item(Item &to, const KernelParams &params, Pass pass) {
    const int word = planned_word(params, pass), lane = threadIdx.x % 32;
    __syncwarp();
    if (lane < kItemWords) reinterpret_cast<int *>(&to)[lane] = word;
    __syncwarp();
}
// Of the first launch. All of the item is read here, so that it is in L1 when a warp comes for it.
__device__ __forceinline__ bool is_transition(const KernelParams &params) {
    return __shfl_sync(~0u, planned_word(params, Pass::First), offsetof(Item, transition) / 4);
}

}  // namespace linattn::cuda::kda
