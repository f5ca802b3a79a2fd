#include "common/tensor_map.h"

#include <cudaTypedefs.h>

#include "common/check_cuda.h"

namespace linattn::cuda {

namespace {

constexpr int kMaxAxes = 5;
constexpr int64_t kMaxSize = int64_t{1} << 32;
constexpr int64_t kMaxStrideBytes = int64_t{1} << 40;

PFN_cuTensorMapEncodeTiled_v12000 find_encoder() {
    void *function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
               "cudaGetDriverEntryPointByVersion(cuTensorMapEncodeTiled)");
    if (found != cudaDriverEntryPointSuccess || function == nullptr)
        fail(Status::Runtime, "The CUDA driver has no cuTensorMapEncodeTiled; driver 580 or newer is needed.");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

CUtensorMapDataType map_dtype(const char *name, DType dtype) {
    switch (dtype) {
        case DType::BF16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
        case DType::F16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
        case DType::F32: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
        default: fail(Status::Unsupported, "%s: TMA copies take bfloat16, float16 or float32.", name);
    }
}

CUtensorMapSwizzle map_swizzle(const char *name, int swizzle_bytes) {
    switch (swizzle_bytes) {
        case 0: return CU_TENSOR_MAP_SWIZZLE_NONE;
        case 32: return CU_TENSOR_MAP_SWIZZLE_32B;
        case 64: return CU_TENSOR_MAP_SWIZZLE_64B;
        case 128: return CU_TENSOR_MAP_SWIZZLE_128B;
        default: fail(Status::Runtime, "%s: a swizzle of %d bytes is not 0, 32, 64 or 128.", name, swizzle_bytes);
    }
}

void check_axis(const char *name, int axis, const TensorMapAxis &a, int64_t element_bytes) {
    if (a.size < 1 || a.size > kMaxSize)
        fail(Status::Unsupported, "%s: axis %d (innermost = 0) has %lld elements; TMA takes 1 to %lld.", name, axis,
             static_cast<long long>(a.size), static_cast<long long>(kMaxSize));
    if (a.box < 1 || a.box > 256)
        fail(Status::Runtime, "%s: a box of %lld elements on axis %d is not 1 to 256.", name, static_cast<long long>(a.box),
             axis);
    if (axis == 0 && a.stride_elems != 1 && a.size > 1)
        fail(Status::Unsupported, "%s: the innermost axis has stride %lld; it must be contiguous.", name,
             static_cast<long long>(a.stride_elems));
    if (axis == 0 || a.size == 1) return;
    if (a.stride_elems < 0 || a.stride_elems >= kMaxStrideBytes / element_bytes || a.stride_elems * element_bytes % 16 != 0)
        fail(Status::Unsupported,
             "%s: the stride of axis %d (innermost = 0) is %lld elements of %lld bytes; it must be a multiple of 16 bytes, not "
             "negative and below 2^40 bytes.",
             name, axis, static_cast<long long>(a.stride_elems), static_cast<long long>(element_bytes));
}

}  // namespace

CUtensorMap make_tensor_map(const char *name, const void *data, DType dtype, std::initializer_list<TensorMapAxis> axes,
                            int swizzle_bytes) {
    const int rank = static_cast<int>(axes.size());
    if (rank < 1 || rank > kMaxAxes) fail(Status::Runtime, "%s: a tensor map of %d axes is not 1 to 5.", name, rank);
    const CUtensorMapDataType type = map_dtype(name, dtype);
    const CUtensorMapSwizzle swizzle = map_swizzle(name, swizzle_bytes);
    const int64_t element_bytes = dtype_bytes(dtype);
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0)
        fail(Status::Unsupported, "%s: starts at address %p, which is not a multiple of 16 bytes.", name, data);

    cuuint64_t sizes[kMaxAxes], strides[kMaxAxes];
    cuuint32_t boxes[kMaxAxes], steps[kMaxAxes];
    cuuint64_t extent_bytes = 16;  // stands in for the stride of an axis of one element
    int axis = 0;
    for (const TensorMapAxis &a : axes) {
        check_axis(name, axis, a, element_bytes);
        sizes[axis] = static_cast<cuuint64_t>(a.size);
        boxes[axis] = static_cast<cuuint32_t>(a.box);
        steps[axis] = 1;
        if (axis > 0) strides[axis - 1] = a.size == 1 ? extent_bytes : static_cast<cuuint64_t>(a.stride_elems * element_bytes);
        axis++;
    }
    const int64_t inner_bytes = boxes[0] * element_bytes;
    if (inner_bytes % 16 != 0 || (swizzle_bytes != 0 && inner_bytes > swizzle_bytes))
        fail(Status::Runtime,
             "%s: an innermost box of %lld bytes is not a multiple of 16, or is wider than the swizzle of %d bytes.", name,
             static_cast<long long>(inner_bytes), swizzle_bytes);

    static const PFN_cuTensorMapEncodeTiled_v12000 encode = find_encoder();
    CUtensorMap map;
    const auto encoded = [&] {
        return encode(&map, type, static_cast<cuuint32_t>(rank), const_cast<void *>(data), sizes, strides, boxes, steps,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    CUresult code = encoded();
    if (code == CUDA_ERROR_INVALID_CONTEXT) {
        // The driver's own functions want what the runtime's bring themselves: the device's context, current to this thread. A
        // thread that has made no other CUDA call has none yet.
        int device = 0;
        check_cuda(cudaGetDevice(&device), "cudaGetDevice");
        check_cuda(cudaSetDevice(device), "cudaSetDevice");
        code = encoded();
    }
    if (code != CUDA_SUCCESS)
        fail(Status::Runtime, "%s: cuTensorMapEncodeTiled refused a map of %d axes with error %d.", name, rank,
             static_cast<int>(code));
    return map;
}

bool tma_fits(const Tensor &t, int64_t B, int64_t T, int64_t heads) {
    const int64_t size[3] = {B, T, heads}, bytes = dtype_bytes(t.dtype);
    if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0 || t.stride[3] != 1) return false;
    for (int axis = 0; axis < 3; axis++)
        if (size[axis] > 1 &&
            (t.stride[axis] <= 0 || t.stride[axis] * bytes % 16 != 0 || t.stride[axis] >= kMaxStrideBytes / bytes))
            return false;
    return true;
}

}  // namespace linattn::cuda
