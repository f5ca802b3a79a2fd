#include "common/launch.h"

#include "common/check_cuda.h"

namespace linattn::cuda {

namespace {

constexpr int64_t kStaticLimitBytes = 48 * 1024;  // above it a kernel must be told, per device
constexpr int64_t kMaxClusterBlocks = 8;          // the portable limit

int64_t volume(const Extent &e) { return e.x * e.y * e.z; }

dim3 to_dim3(const Extent &e) {
    return dim3(static_cast<unsigned>(e.x), static_cast<unsigned>(e.y), static_cast<unsigned>(e.z));
}

void check_shape(const char *name, const LaunchConfig &c) {
    if (c.grid.x < 0 || c.grid.x > 2147483647 || c.grid.y < 0 || c.grid.y > 65535 || c.grid.z < 0 || c.grid.z > 65535)
        fail(Status::Runtime, "%s: a grid of (%lld, %lld, %lld) blocks is outside (2147483647, 65535, 65535).", name,
             static_cast<long long>(c.grid.x), static_cast<long long>(c.grid.y), static_cast<long long>(c.grid.z));
    if (c.block.x < 1 || c.block.y < 1 || c.block.z < 1 || c.block.x > 1024 || c.block.y > 1024 || c.block.z > 64 ||
        volume(c.block) > 1024)
        fail(Status::Runtime, "%s: a block of (%lld, %lld, %lld) threads is not 1 to 1024 threads.", name,
             static_cast<long long>(c.block.x), static_cast<long long>(c.block.y), static_cast<long long>(c.block.z));
    const Extent &k = c.cluster;
    if (k.x < 1 || k.y < 1 || k.z < 1 || k.x > kMaxClusterBlocks || k.y > kMaxClusterBlocks || k.z > kMaxClusterBlocks ||
        volume(k) > kMaxClusterBlocks || c.grid.x % k.x != 0 || c.grid.y % k.y != 0 || c.grid.z % k.z != 0)
        fail(Status::Runtime,
             "%s: a cluster of (%lld, %lld, %lld) blocks does not divide the grid (%lld, %lld, %lld), or has more than %lld "
             "blocks.",
             name, static_cast<long long>(k.x), static_cast<long long>(k.y), static_cast<long long>(k.z),
             static_cast<long long>(c.grid.x), static_cast<long long>(c.grid.y), static_cast<long long>(c.grid.z),
             static_cast<long long>(kMaxClusterBlocks));
}

// The limit is a property of kernel and device that stays with the process. It is set at every launch rather than remembered:
// no state of ours, right on every device and after a device reset. Threads that race write the same value, because a kernel is
// always launched with one size (its Config's).
void raise_smem_limit(const char *name, const void *kernel, int64_t bytes) {
    if (bytes <= kStaticLimitBytes) return;
    int device = 0, limit = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    check_cuda(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
    if (bytes > limit)
        fail(Status::Runtime, "%s: needs %lld bytes of shared memory per block; device %d has %d.", name,
             static_cast<long long>(bytes), device, limit);
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
               "cudaFuncSetAttribute");
}

}  // namespace

void launch_kernel(const char *name, const void *kernel, const LaunchConfig &config, void **arguments) {
    check_shape(name, config);
    if (volume(config.grid) == 0) return;
    if (config.smem_bytes < 0)
        fail(Status::Runtime, "%s: %lld bytes of shared memory.", name, static_cast<long long>(config.smem_bytes));
    raise_smem_limit(name, kernel, config.smem_bytes);

    cudaLaunchAttribute attributes[2];
    unsigned count = 0;
    if (volume(config.cluster) > 1) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count].val.clusterDim.x = static_cast<unsigned>(config.cluster.x);
        attributes[count].val.clusterDim.y = static_cast<unsigned>(config.cluster.y);
        attributes[count].val.clusterDim.z = static_cast<unsigned>(config.cluster.z);
        count++;
    }
    if (config.programmatic) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count].val.programmaticStreamSerializationAllowed = 1;
        count++;
    }
    cudaLaunchConfig_t launch_config = {};
    launch_config.gridDim = to_dim3(config.grid);
    launch_config.blockDim = to_dim3(config.block);
    launch_config.dynamicSmemBytes = static_cast<size_t>(config.smem_bytes);
    launch_config.stream = config.stream;
    launch_config.attrs = attributes;
    launch_config.numAttrs = count;

    const cudaError_t code = cudaLaunchKernelExC(&launch_config, kernel, arguments);
    if (code != cudaSuccess) {
        cudaGetLastError();  // the code above is the whole truth; what it left behind must not meet the next caller
        fail(
            Status::Runtime,
            "%s: the launch of a grid of (%lld, %lld, %lld) blocks of %lld threads with %lld bytes of shared memory failed: %s "
            "(%s). Earlier asynchronous work of this process may be the cause.",
            name, static_cast<long long>(config.grid.x), static_cast<long long>(config.grid.y),
            static_cast<long long>(config.grid.z), static_cast<long long>(volume(config.block)),
            static_cast<long long>(config.smem_bytes), cudaGetErrorString(code), cudaGetErrorName(code));
    }
}

}  // namespace linattn::cuda
