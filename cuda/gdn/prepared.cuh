// What gdn_fwd_prepare_kernel leaves of a chunk and value head, and the load warp that brings it to the scans.
#pragma once
#include "load.cuh"

namespace linattn::cuda::gdn {

// Of a table, from kBeta on: what the state loop reads.
constexpr int kPreparedFactors = table::kFloats - table::kBeta;

// Tiles as they lie in shared memory.
struct alignas(128) Prepared {
    uint8_t a[kChunk * kChunk * 2], p[kChunk * kChunk * 2];
    float factors[kPreparedFactors];
    alignas(128) uint8_t a_second[kChunk * kChunk * 2], p_second[kChunk * kChunk * 2];  // only where a token needs them
};

// The load warp of a scan over prepared chunks: as load() does, with A^, P and factors on the tiles' barrier.
template <class C>
__device__ __forceinline__ void load_prepared(const KernelParams &params, const CUtensorMap *map_q, const CUtensorMap *map_k,
                                              const CUtensorMap *map_v, Smem<C> &smem) {
    using S = Smem<C>;
    static_assert(kTileStages == kValueStages, "tiles and values are filled in step");
    constexpr uint32_t kProducts = S::Product::kBytes * (C::kOutputs ? 2 : 1);
    constexpr uint32_t kBytes = S::Tile::kBytes * (C::kOutputs ? 2 : 1) + kProducts + sizeof(Prepared::factors);
    RingState<kTileStages> place;
    RingState<kItemStages> slot;
    RingState<1> second;
    uint32_t tail_phase = 0;
    for (uint32_t round = 0; round * gridDim.x < smem.items; round++) {
        smem.item_ring().wait_empty(slot);
        Item &item = smem.item[slot.stage];
        find_item<C>(params, smem, round, item);
        __syncwarp();
        const bool exists = item.exists;
        __syncwarp();
        if (!exists) continue;
        warp_arrive(smem.item_ring().full(slot.stage), threadIdx.x % 32);
        slot.advance();
        const bool has_values = C::kOutputs || item.piece == 0;
        const int lane = threadIdx.x % 32, head_qk = item.head_qk, column = C::kOutputs ? item.piece * C::kColumns : 0;
        const int HV = static_cast<int>(params.p.HV), length = item.length;
        int64_t index = int64_t{item.prepared} * HV + item.head;
        int precise = kChunk;  // of the lane's chunk among 32
#pragma unroll 1
        for (int at = 0; at < length; at += kChunk, index += HV) {
            const int number = at / kChunk % 32;
            if (number == 0) precise = at + lane * kChunk < length ? params.g_precise[index + lane * HV] : kChunk;
            const bool low = __shfl_sync(~0u, precise, number) < kChunk;
            const bool tail = length - at < kChunk;
            const uint32_t k = ptx::shared_address(smem.k[place.stage]), v = ptx::shared_address(smem.v[place.stage]);
            const uint32_t q = C::kOutputs ? ptx::shared_address(smem.q[place.stage]) : 0;
            const uint32_t landed = ptx::shared_address(&smem.tail_landed);
            const uint32_t tile_full = smem.tiles().full(place.stage), value_full = smem.values().full(place.stage);
            smem.tiles().wait_empty(place);
            if (low) {
                smem.seconds().wait_empty(second);
                second.advance();
            }
            if (lane == 0) {
                const uint32_t to = tail ? landed : tile_full;
                const Prepared &g_from = params.g_prepared[index];
                ptx::mbarrier_arrive_expect_tx(to, kBytes + (low ? kProducts : 0));
                const auto copy = [&](const void *s_to, const void *from, uint32_t bytes) {
                    ptx::cp_async_bulk_load(ptx::shared_address(s_to), from, bytes, to);
                };
                load_tile<typename S::Tile>(k, map_k, to, 0, head_qk, item.bos + at, item.batch);
                copy(smem.a[place.stage], g_from.a, sizeof(g_from.a));
                if constexpr (C::kOutputs) {
                    load_tile<typename S::Tile>(q, map_q, to, 0, head_qk, item.bos + at, item.batch);
                    copy(smem.p[place.stage], g_from.p, sizeof(g_from.p));
                }
                copy(&smem.table[place.stage][table::kBeta], g_from.factors, sizeof(g_from.factors));
                if (low) {
                    copy(smem.second[0], g_from.a_second, sizeof(g_from.a_second));
                    if constexpr (C::kOutputs) copy(smem.second[1], g_from.p_second, sizeof(g_from.p_second));
                }
            }
            smem.values().wait_empty(place);
            if (lane == 0) {
                ptx::mbarrier_arrive_expect_tx(tail ? landed : value_full, has_values ? S::Values::kBytes : 0);
                if (has_values)
                    load_tile<typename S::Values>(v, map_v, tail ? landed : value_full, column, item.head, item.bos + at,
                                                  item.batch);
            } else if (kWarpArrivals == 32 && !tail) {
                ptx::mbarrier_arrive(tile_full);
                ptx::mbarrier_arrive(value_full);
            }
            if (tail) {
                __syncwarp();
                ptx::mbarrier_wait_parity(landed, tail_phase);
                tail_phase ^= 1;
                clear_rows<typename S::Tile>(k, length - at, lane);
                if constexpr (C::kOutputs) clear_rows<typename S::Tile>(q, length - at, lane);
                if (has_values) clear_rows<typename S::Values>(v, length - at, lane);
                ptx::fence_proxy_async_shared_cta();
                warp_arrive(tile_full, lane);
                warp_arrive(value_full, lane);
            }
            __syncwarp();
            place.advance();
        }
    }
    smem.item_ring().wait_empty(slot);
    __syncwarp();
    if (threadIdx.x % 32 == 0) smem.item[slot.stage].exists = false;
    warp_arrive(smem.item_ring().full(slot.stage), threadIdx.x % 32);
}

}  // namespace linattn::cuda::gdn
