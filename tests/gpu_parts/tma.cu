// Copies by the async proxy: tensor loads and stores of rank 2 to 5 with ragged edges, 1-D bulk copies, multicast over a
// cluster, pushes into another CTA, and cp.async.
#include "common/tensor_map.h"
#include "parts.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cta.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"

namespace parts {

using namespace linattn::ptx;

constexpr int kBoxBytes = 32768;  // the largest box the tests copy

struct BoxCase {
    int32_t c[5];
    int bytes;  // of a whole box
    bool hint;
    bool map_in_global;  // through the copy of the map that this kernel makes
};

template <int kRank>
__device__ __forceinline__ void load_box(uint32_t destination, const CUtensorMap *map, uint32_t barrier, const BoxCase &p) {
    const uint64_t policy = p.hint ? createpolicy_evict_first() : 0;
    if constexpr (kRank == 2)
        p.hint ? cp_async_bulk_tensor_2d_load_hint(destination, map, barrier, p.c[0], p.c[1], policy)
               : cp_async_bulk_tensor_2d_load(destination, map, barrier, p.c[0], p.c[1]);
    if constexpr (kRank == 3)
        p.hint ? cp_async_bulk_tensor_3d_load_hint(destination, map, barrier, p.c[0], p.c[1], p.c[2], policy)
               : cp_async_bulk_tensor_3d_load(destination, map, barrier, p.c[0], p.c[1], p.c[2]);
    if constexpr (kRank == 4)
        p.hint ? cp_async_bulk_tensor_4d_load_hint(destination, map, barrier, p.c[0], p.c[1], p.c[2], p.c[3], policy)
               : cp_async_bulk_tensor_4d_load(destination, map, barrier, p.c[0], p.c[1], p.c[2], p.c[3]);
    if constexpr (kRank == 5)
        p.hint ? cp_async_bulk_tensor_5d_load_hint(destination, map, barrier, p.c[0], p.c[1], p.c[2], p.c[3], p.c[4], policy)
               : cp_async_bulk_tensor_5d_load(destination, map, barrier, p.c[0], p.c[1], p.c[2], p.c[3], p.c[4]);
}

template <int kRank>
__device__ __forceinline__ void store_box(const CUtensorMap *map, uint32_t source, const BoxCase &p) {
    if constexpr (kRank == 2) cp_async_bulk_tensor_2d_store(map, source, p.c[0], p.c[1]);
    if constexpr (kRank == 3) cp_async_bulk_tensor_3d_store(map, source, p.c[0], p.c[1], p.c[2]);
    if constexpr (kRank == 4) cp_async_bulk_tensor_4d_store(map, source, p.c[0], p.c[1], p.c[2], p.c[3]);
    if constexpr (kRank == 5) cp_async_bulk_tensor_5d_store(map, source, p.c[0], p.c[1], p.c[2], p.c[3], p.c[4]);
}

// Writes the map to global memory for the users of map_in_global: generic stores, made visible to the tensor-map proxy.
__global__ void publish_map_kernel(const __grid_constant__ CUtensorMap map, CUtensorMap *g_map) {
    *g_map = map;
    fence_proxy_tensormap_release_gpu();
}

// One box, dumped as it lies in shared memory.
template <int kRank>
__global__ void box_load_kernel(const __grid_constant__ CUtensorMap map, const CUtensorMap *g_map, uint32_t *out, BoxCase p) {
    unsigned char *smem = aligned_smem();
    __shared__ uint64_t s_barrier;
    const uint32_t barrier = shared_address(&s_barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
    }
    for (int i = threadIdx.x; i < p.bytes / 4; i += blockDim.x) reinterpret_cast<uint32_t *>(smem)[i] = 0x7fff7fffu;
    fence_proxy_async_shared_cta();
    __syncthreads();
    if (threadIdx.x < 32 && elect_sync()) {
        const CUtensorMap *used = p.map_in_global ? g_map : &map;
        if (p.map_in_global)
            fence_proxy_tensormap_acquire_gpu(g_map);
        else
            prefetch_tensormap(&map);
        mbarrier_arrive_expect_tx(barrier, p.bytes);
        load_box<kRank>(shared_address(smem), used, barrier, p);
    }
    mbarrier_wait_parity(barrier, 0);
    for (int i = threadIdx.x; i < p.bytes / 4; i += blockDim.x) out[i] = reinterpret_cast<uint32_t *>(smem)[i];
    __syncthreads();
    if (threadIdx.x == 0) mbarrier_inval(barrier);
}

// The reverse: in[] placed in shared memory as given, stored as one box.
template <int kRank>
__global__ void box_store_kernel(const __grid_constant__ CUtensorMap map, const uint32_t *in, BoxCase p) {
    unsigned char *smem = aligned_smem();
    for (int i = threadIdx.x; i < p.bytes / 4; i += blockDim.x) reinterpret_cast<uint32_t *>(smem)[i] = in[i];
    fence_proxy_async_shared_cta();
    __syncthreads();
    if (threadIdx.x == 0) {
        store_box<kRank>(&map, shared_address(smem), p);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read<0>();
        cp_async_bulk_wait_group<0>();
    }
}

// Global -> shared -> global in 1-D, in two halves under one barrier phase; blocks take pieces of `bytes`.
__global__ void bulk_kernel(const unsigned char *in, unsigned char *out, int bytes, bool hint) {
    unsigned char *smem = aligned_smem();
    __shared__ uint64_t s_barrier;
    const uint32_t barrier = shared_address(&s_barrier), tile = shared_address(smem);
    in += int64_t{blockIdx.x} * bytes;
    out += int64_t{blockIdx.x} * bytes;
    if (threadIdx.x == 0) {
        cp_async_bulk_prefetch(in, bytes);
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        const int first = bytes / 32 * 16;  // of the two pieces; may be 0
        mbarrier_expect_tx(barrier, first);
        mbarrier_arrive_expect_tx(barrier, bytes - first);
        if (hint) {
            const uint64_t policy = createpolicy_evict_last();
            if (first > 0) cp_async_bulk_load_hint(tile, in, first, barrier, policy);
            cp_async_bulk_load_hint(tile + first, in + first, bytes - first, barrier, policy);
        } else {
            if (first > 0) cp_async_bulk_load(tile, in, first, barrier);
            cp_async_bulk_load(tile + first, in + first, bytes - first, barrier);
        }
        mbarrier_wait_parity(barrier, 0, 1000);
        cp_async_bulk_store(out, tile, bytes);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group<0>();
    }
}

// A cluster loads one [64, kCols] tile together: CTA r fetches rows [r, r+1) * 64 / size and multicasts them to all; every CTA
// dumps the whole tile. mode 0: tensor map; 1: the same with an L2 hint; 2: 1-D bulk.
__global__ void multicast_kernel(const __grid_constant__ CUtensorMap map, const unsigned char *in, uint32_t *out,
                                 int tile_bytes, int mode) {
    unsigned char *smem = aligned_smem();
    __shared__ uint64_t s_barrier;
    const uint32_t barrier = shared_address(&s_barrier);
    const uint32_t rank = cluster_ctarank(), size = cluster_nctarank();
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
    }
    barrier_cluster_arrive();
    barrier_cluster_wait();
    if (threadIdx.x == 0) {
        const int piece = tile_bytes / size;
        const uint32_t destination = shared_address(smem) + rank * piece;
        const uint16_t everyone = static_cast<uint16_t>((1u << size) - 1);
        const int32_t row = static_cast<int32_t>(rank * (64 / size));
        mbarrier_arrive_expect_tx(barrier, tile_bytes);
        if (mode == 0)
            cp_async_bulk_tensor_2d_load_multicast(destination, &map, barrier, 0, row, everyone);
        else if (mode == 1)
            cp_async_bulk_tensor_2d_load_multicast_hint(destination, &map, barrier, 0, row, everyone,
                                                        createpolicy_evict_first());
        else
            cp_async_bulk_load_multicast(destination, in + rank * piece, piece, barrier, everyone);
    }
    mbarrier_wait_parity(barrier, 0);
    for (int i = threadIdx.x; i < tile_bytes / 4; i += blockDim.x)
        out[blockIdx.x * (tile_bytes / 4) + i] = reinterpret_cast<uint32_t *>(smem)[i];
    barrier_cluster_arrive_relaxed();  // nobody leaves while a peer may still send to it
    barrier_cluster_wait();
}

// Pairs of CTAs; rank 0 sends 4096 bytes to rank 1, which dumps them. mode 0: cp.async.bulk shared -> shared; 1: st.async; 2:
// st.shared::cluster and a remote arrival per thread; 3: rank 1 reads by ld.shared::cluster; 4: as 2 in 16-byte stores.
__global__ void __launch_bounds__(128) push_kernel(const uint32_t *in, uint32_t *out, int mode) {
    constexpr int kWords = 1024;
    alignas(128) __shared__ uint32_t s_tile[kWords];
    __shared__ uint64_t s_barrier;
    const uint32_t barrier = shared_address(&s_barrier), tile = shared_address(s_tile), rank = cluster_ctarank();
    const int t = threadIdx.x;
    in += blockIdx.x / 2 * kWords;
    out += blockIdx.x / 2 * kWords;
    for (int i = t; i < kWords; i += 128) s_tile[i] = rank == 0 ? in[i] : 0xdeadbeefu;
    if (t == 0) {
        mbarrier_init(barrier, mode == 2 || mode == 4 ? 128 : 1);
        fence_mbarrier_init();
        if (mode < 2) mbarrier_arrive_expect_tx(barrier, kWords * 4);
    }
    fence_proxy_async();
    barrier_cluster_arrive();
    barrier_cluster_wait();
    const uint32_t peer_tile = mapa(tile, rank ^ 1), peer_barrier = mapa(barrier, rank ^ 1);
    if (rank == 0) {
        const uint4 *mine = reinterpret_cast<const uint4 *>(s_tile);
        if (mode == 0 && t == 0) cp_async_bulk_push(peer_tile, tile, kWords * 4, peer_barrier);
        if (mode == 1)
            for (int i = t; i < kWords / 4; i += 128) st_async_v4_u32(peer_tile + 16 * i, mine[i], peer_barrier);
        if (mode == 2)
            for (int i = t; i < kWords; i += 128) st_shared_cluster_u32(peer_tile + 4 * i, s_tile[i]);
        if (mode == 4)
            for (int i = t; i < kWords / 4; i += 128) st_shared_cluster_v4_u32(peer_tile + 16 * i, mine[i]);
        if (mode == 2 || mode == 4) mbarrier_arrive_cluster(peer_barrier);
    } else {
        if (mode == 3)
            for (int i = t; i < kWords; i += 128) s_tile[i] = ld_shared_cluster_u32(peer_tile + 4 * i);
        else
            mbarrier_wait_parity_cluster(barrier, 0);
        for (int i = t; i < kWords; i += 128) out[i] = s_tile[i];
    }
    barrier_cluster_arrive();
    barrier_cluster_wait();
}

// 128 threads copy 16 bytes each by cp.async, thread t only bytes[t] of them (bytes null: all). Completion by wait_group or,
// with `arrive`, by cp.async.mbarrier.arrive.
__global__ void __launch_bounds__(128) cp_async_kernel(const uint4 *in, const int *bytes, uint4 *out, bool arrive) {
    __shared__ uint4 s_tile[128];
    __shared__ uint64_t s_barrier;
    const uint32_t barrier = shared_address(&s_barrier);
    const int t = threadIdx.x;
    if (t == 0) mbarrier_init(barrier, 128);
    __syncthreads();
    const uint32_t destination = shared_address(s_tile + t);
    if (bytes == nullptr)
        cp_async_16(destination, in + t);
    else
        cp_async_16_zfill(destination, in + t, bytes[t]);
    if (arrive) {
        cp_async_mbarrier_arrive_noinc(barrier);
        mbarrier_wait_parity(barrier, 0);
    } else {
        cp_async_commit_group();
        cp_async_wait_group<0>();
        __syncthreads();
    }
    out[t] = s_tile[127 - t];
}

CUtensorMap map_of(void *data, int dtype, int rank, const int64_t *sizes, const int64_t *strides, const int64_t *boxes,
                   int swizzle_bytes) {
    using Axis = linattn::cuda::TensorMapAxis;
    const auto axis = [&](int i) { return Axis{sizes[i], strides[i], boxes[i]}; };
    const auto type = static_cast<linattn::DType>(dtype);
    if (rank == 2) return linattn::cuda::make_tensor_map("x", data, type, {axis(0), axis(1)}, swizzle_bytes);
    if (rank == 3) return linattn::cuda::make_tensor_map("x", data, type, {axis(0), axis(1), axis(2)}, swizzle_bytes);
    if (rank == 4) return linattn::cuda::make_tensor_map("x", data, type, {axis(0), axis(1), axis(2), axis(3)}, swizzle_bytes);
    return linattn::cuda::make_tensor_map("x", data, type, {axis(0), axis(1), axis(2), axis(3), axis(4)}, swizzle_bytes);
}

BoxCase box_case(int dtype, int rank, const int64_t *boxes, const int32_t *coordinates) {
    BoxCase p = {};
    int64_t elements = 1;
    for (int i = 0; i < rank; i++) {
        p.c[i] = coordinates[i];
        elements *= boxes[i];
    }
    p.bytes = static_cast<int>(elements * linattn::dtype_bytes(static_cast<linattn::DType>(dtype)));
    if (p.bytes > kBoxBytes) linattn::fail(linattn::Status::Value, "a box of %d bytes is larger than %d.", p.bytes, kBoxBytes);
    return p;
}

linattn::cuda::LaunchConfig box_config() {
    linattn::cuda::LaunchConfig config;
    config.block = {128};
    config.smem_bytes = kBoxBytes + 1024;
    return config;
}

}  // namespace parts

using linattn::cuda::launch;
using linattn::cuda::LaunchConfig;
using parts::guarded;

// g_map: 128 bytes of device memory, 64-byte aligned, used when map_in_global is set.
PARTS_API int parts_box_load(void *data, int dtype, int rank, const int64_t *sizes, const int64_t *strides,
                             const int64_t *boxes, int swizzle_bytes, const int32_t *coordinates, uint32_t *out, int hint,
                             int map_in_global, void *g_map) {
    return guarded([&] {
        const CUtensorMap map = parts::map_of(data, dtype, rank, sizes, strides, boxes, swizzle_bytes);
        parts::BoxCase p = parts::box_case(dtype, rank, boxes, coordinates);
        p.hint = hint != 0;
        p.map_in_global = map_in_global != 0;
        CUtensorMap *copy = static_cast<CUtensorMap *>(g_map);
        LaunchConfig one_thread;
        if (p.map_in_global) launch("publish_map_kernel", parts::publish_map_kernel, one_thread, map, copy);
        auto kernel = rank == 2   ? parts::box_load_kernel<2>
                      : rank == 3 ? parts::box_load_kernel<3>
                      : rank == 4 ? parts::box_load_kernel<4>
                                  : parts::box_load_kernel<5>;
        launch("box_load_kernel", kernel, parts::box_config(), map, copy, out, p);
    });
}

PARTS_API int parts_box_store(void *data, int dtype, int rank, const int64_t *sizes, const int64_t *strides,
                              const int64_t *boxes, int swizzle_bytes, const int32_t *coordinates, const uint32_t *in) {
    return guarded([&] {
        const CUtensorMap map = parts::map_of(data, dtype, rank, sizes, strides, boxes, swizzle_bytes);
        auto kernel = rank == 2   ? parts::box_store_kernel<2>
                      : rank == 3 ? parts::box_store_kernel<3>
                      : rank == 4 ? parts::box_store_kernel<4>
                                  : parts::box_store_kernel<5>;
        launch("box_store_kernel", kernel, parts::box_config(), map, in, parts::box_case(dtype, rank, boxes, coordinates));
    });
}

PARTS_API int parts_bulk(const unsigned char *in, unsigned char *out, int blocks, int bytes, int hint) {
    return guarded([&] {
        LaunchConfig config;
        config.grid = {blocks};
        config.block = {32};
        config.smem_bytes = parts::kBoxBytes + 1024;
        launch("bulk_kernel", parts::bulk_kernel, config, in, out, bytes, hint != 0);
    });
}

// data: [64,64] bf16 row-major per cluster (all clusters the same tile); out: [clusters * size][64*64] bf16 as it lies.
PARTS_API int parts_multicast(void *data, uint32_t *out, int clusters, int size, int mode) {
    return guarded([&] {
        const int64_t sizes[2] = {64, 64}, strides[2] = {1, 64}, boxes[2] = {64, 64 / size};
        const CUtensorMap map =
            parts::map_of(data, static_cast<int>(linattn::DType::BF16), 2, sizes, strides, boxes, mode == 2 ? 0 : 128);
        LaunchConfig config;
        config.grid = {clusters * size};
        config.block = {128};
        config.cluster = {size};
        config.smem_bytes = 8192 + 1024;
        launch("multicast_kernel", parts::multicast_kernel, config, map, static_cast<const unsigned char *>(data), out, 8192,
               mode);
    });
}

PARTS_API int parts_push(const uint32_t *in, uint32_t *out, int pairs, int mode) {
    return guarded([&] {
        LaunchConfig config;
        config.grid = {2 * pairs};
        config.block = {128};
        config.cluster = {2};
        launch("push_kernel", parts::push_kernel, config, in, out, mode);
    });
}

PARTS_API int parts_cp_async(const void *in, const int *bytes, void *out, int arrive) {
    return guarded([&] {
        LaunchConfig config;
        config.block = {128};
        launch("cp_async_kernel", parts::cp_async_kernel, config, static_cast<const uint4 *>(in), bytes,
               static_cast<uint4 *>(out), arrive != 0);
    });
}
