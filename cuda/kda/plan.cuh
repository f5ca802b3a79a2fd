// The items of a launch of the scan, cut on the device from cu_seqlens.
#pragma once
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
    bool from_identity;  // M: from the identity, with V = 0
    bool exists;

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

    // Slots of the sequences before n.
    __device__ __forceinline__ int slots_before(int n) const {
        int slots = 0;
        for (int m = 0; m < n; m++) slots += segments[m] > 1 ? segments[m] - 1 : 0;
        return slots;
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
};

// The items of a launch and the order of the sequences, in shared memory.
struct Plan {
    uint32_t items, ctas;        // gridDim.x, where it takes no register
    int chunks[kMaxSorted];      // of a sequence, in this slab; -1: nothing to do
    uint16_t order[kMaxSorted];  // the longest first
    int present;                 // sequences with something to do, if they are sorted, or all
    bool is_sorted;              // sequences are taken in `order`
    bool halves;                 // of whole sequences: 64 columns of V a CTA
    Cut cut;

    // CTAs that compute first segments' outputs in the launch where others compute transitions.
    __device__ __forceinline__ uint32_t first_outputs(const DeltaParams &p) const {
        return static_cast<uint32_t>(cut.count[0]) * static_cast<uint32_t>(p.HV) * (static_cast<uint32_t>(p.V) / 64);
    }

    // Item of a CTA in a round over the grid: the longest first, and every second round backwards, so that who had a long one
    // gets a short one next.
    __device__ __forceinline__ uint32_t place(uint32_t round, uint32_t cta) const {
        return round * ctas + (round % 2 == 0 ? cta : ctas - 1 - cta);
    }

    // By the whole CTA. pieces: CTAs of a sequence and head where it is not cut.
    __device__ __forceinline__ void make(const KernelParams &params, Pass pass, int pieces, int threads) {
        const DeltaParams &p = params.p;
        if (threadIdx.x < 32) {
            if (pass != Pass::Whole) cut.make(params);
            if (threadIdx.x == 0) {
                const uint32_t HV = static_cast<uint32_t>(p.HV);
                items = pass == Pass::Whole   ? static_cast<uint32_t>(p.N) * HV * static_cast<uint32_t>(pieces)
                        : pass == Pass::First ? first_outputs(p) + 2 * HV * static_cast<uint32_t>(cut.count[1])
                                              : HV * static_cast<uint32_t>(pieces) * static_cast<uint32_t>(cut.count[2]);
            }
        }
        __syncthreads();
        sort(params, pass == Pass::Whole && items > gridDim.x, threads);
        if (!is_sorted) return;
        if (threadIdx.x == 0)
            items = static_cast<uint32_t>(present) * static_cast<uint32_t>(p.HV) * static_cast<uint32_t>(pieces);
        __syncthreads();
    }

    // The same for whole sequences and V in one CTA or two, whichever ends first. Where not even one CTA each fits, one.
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
    // Where sequences are cut there is one round.
    __device__ __forceinline__ void find(Item &to, const KernelParams &params, Pass pass, int pieces, uint32_t round) const {
        const Item item = found(params, pass, pieces, round);
        __syncwarp();
        if (threadIdx.x % 32 == 0) to = item;
        __syncwarp();
    }

    __device__ __forceinline__ Item found(const KernelParams &params, Pass pass, int pieces, uint32_t round) const {
        const DeltaParams &p = params.p;
        Item item = {};
        uint32_t index = place(round, blockIdx.x);
        item.exists = round * ctas < items;
        if (index >= items) {  // the last round is not full: nothing to do
            item.read_row = -1;
            return item;
        }
        const bool transition = pass == Pass::First && index >= first_outputs(p);
        if (transition) index -= first_outputs(p), pieces = 2;  // N and M
        const uint32_t HV = static_cast<uint32_t>(p.HV), pair = index / static_cast<uint32_t>(pieces);
        const int piece = index % static_cast<uint32_t>(pieces);
        item.piece = transition ? 0 : piece;
        item.from_identity = transition && piece != 0;
        item.head = pair % HV;
        int sequence = pair / HV, bos, length;
        item.segments = 1;
        if (pass != Pass::Whole)
            sequence = cut.find(sequence, pass == Pass::First && !transition, transition, item);
        else if (is_sorted)
            sequence = order[sequence];
        sequence_range(p, sequence, bos, length);
        const int row = read_row(p, sequence);
        item.sequence = sequence;
        item.batch = p.cu_seqlens ? 0 : sequence;
        item.bos = bos;
        item.read_row = row;
        item.length = row < 0 ? 0 : length;
        item.cleared = row < 0 ? length : 0;
        return item;
    }
};

}  // namespace linattn::cuda::kda
