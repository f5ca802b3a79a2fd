/* Every tensor of an argument struct from Python objects in one call, by their library's DLPack C exchange API.
 *
 * The parts of that interface and of a Python object that are used are declared here, so that neither dlpack.h nor Python.h is
 * needed to build. DLPack's struct of functions keeps its layout within major version 1, which pylinattn/_exchange.py checks,
 * as it does that objects and tuples lie in memory as this file takes them to. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "linattn.h"

typedef struct {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    const int64_t *shape, *strides;
    uint64_t byte_offset;
} Lent; /* DLTensor */

typedef struct {
    uint32_t major, minor;
    const void *older;
    void (*allocate)(void), (*own)(void), (*hand_over)(void);
    int (*lend)(void *object, Lent *out); /* 0, or -1 with a Python exception set; the object keeps the ownership */
    int (*current_stream)(int32_t device_type, int32_t device_id, void **out);
} Api;

enum { kF = 2, kI = 0, kU = 1, kBF = 4 }; /* DLDataTypeCode */

static int32_t dtype_of(const Lent *t) {
    if (t->lanes != 1) return 0;
    switch (t->code << 8 | t->bits) {
        case kF << 8 | 32: return LINATTN_F32;
        case kF << 8 | 64: return LINATTN_F64;
        case kF << 8 | 16: return LINATTN_F16;
        case kBF << 8 | 16: return LINATTN_BF16;
        case kI << 8 | 32: return LINATTN_I32;
        case kI << 8 | 64: return LINATTN_I64;
        case kU << 8 | 8: return LINATTN_U8;
        default: return 0;
    }
}

static uint64_t mix(uint64_t key, uint64_t word) { return ((key << 23 | key >> 41) ^ word) * 0x9e3779b97f4a7c15u; }

/* The tensor in another shape; 0 if that is no view of it. `last` is the size of q's last axis. */
static int view_as(linattn_tensor *t, char view, int64_t last) {
    if (view == LINATTN_VIEW_SWAP) {
        if (t->ndim != 4) return 0;
        const int64_t size = t->shape[2], stride = t->strides[2];
        t->shape[2] = t->shape[3], t->strides[2] = t->strides[3];
        t->shape[3] = size, t->strides[3] = stride;
        return 1;
    }
    int64_t elements = 1;
    for (int i = t->ndim - 1; i >= 0; --i) {
        if (t->shape[i] != 1 && t->strides[i] != elements) return 0;
        elements *= t->shape[i];
    }
    if (view == LINATTN_VIEW_ROWS && (last < 1 || elements % last)) return 0;
    memset(t->shape, 0, sizeof t->shape);
    memset(t->strides, 0, sizeof t->strides);
    t->ndim = view == LINATTN_VIEW_ROWS ? 2 : 1;
    t->shape[0] = view == LINATTN_VIEW_ROWS ? elements / last : elements;
    t->strides[0] = view == LINATTN_VIEW_ROWS ? last : 1;
    if (view == LINATTN_VIEW_ROWS) t->shape[1] = last, t->strides[1] = 1;
    return 1;
}

uint64_t linattn_exchange_borrow(const linattn_exchange *from, void *const *objects, int32_t count, const char *views,
                                 char *args) {
    const Api *api = from->api;
    linattn_tensor *tensors = (linattn_tensor *)(args + sizeof(uint64_t));
    uint64_t key = 1, size;
    memcpy(&size, args, sizeof size);
    for (int32_t i = 0; i < count; ++i) {
        if (objects[i] == from->none) continue;
        const void *type;
        memcpy(&type, (const char *)objects[i] + from->type_at, sizeof type);
        if (type != from->types[0] && type != from->types[1]) return 0;
        Lent lent;
        if (api->lend(objects[i], &lent)) return 0;
        linattn_tensor *t = &tensors[i];
        const char view = views ? views[i] : LINATTN_VIEW_SAME;
        if (lent.ndim > 5 || (lent.ndim < 1 && view == LINATTN_VIEW_SAME)) return 0;
        if (lent.device_type != LINATTN_CPU && lent.device_type != LINATTN_CUDA) return 0;
        t->dtype = dtype_of(&lent);
        if (!t->dtype) return 0;
        t->ndim = lent.ndim, t->device_type = lent.device_type, t->device_id = lent.device_id;
        t->data = lent.data ? (char *)lent.data + lent.byte_offset : NULL;
        int64_t elements = 1;
        for (int axis = 0; axis < lent.ndim; ++axis) {
            elements *= t->shape[axis] = lent.shape[axis];
            t->strides[axis] = lent.strides[axis];
        }
        if (!t->data && elements) return 0; /* an array that stands for others */
        if (view != LINATTN_VIEW_SAME && !view_as(t, view, tensors[0].shape[3])) return 0;
        key = mix(key, (uint64_t)i << 56 | (uint64_t)t->device_id << 32 | (uint64_t)t->device_type << 24 |
                           (uint64_t)t->ndim << 16 | (uint64_t)t->dtype << 8 | ((uintptr_t)t->data & 15));
        for (int axis = 0; axis < t->ndim; ++axis) key = mix(mix(key, (uint64_t)t->shape[axis]), (uint64_t)t->strides[axis]);
    }
    /* the scalars behind the tensors, and the stream as the last of them */
    const char *scalars = (const char *)(tensors + count), *end = args + size - sizeof(void *);
    for (; scalars + sizeof(uint64_t) <= end; scalars += sizeof(uint64_t)) {
        uint64_t word;
        memcpy(&word, scalars, sizeof word);
        key = mix(key, word);
    }
    if (tensors[0].device_type == LINATTN_CUDA) {
        void *stream = NULL;
        if (api->current_stream(LINATTN_CUDA, tensors[0].device_id, &stream)) return 0;
        memcpy(args + size - sizeof stream, &stream, sizeof stream);
    }
    key ^= key >> 32;
    return key ? key : 1;
}
