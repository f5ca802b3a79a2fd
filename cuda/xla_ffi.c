/* XLA calls the ops through these handlers: XLA's foreign function interface in plain C, on top of the public header.
 *
 * The part of the interface that is used is declared here, so that no jaxlib is needed to build. It is the part that binary
 * interface 0.1 already had: every struct begins with its size, and later versions only append. tests/test_jax.py compares
 * the offsets with XLA's header.
 *
 * A call carries buffers by position and attributes by name. The attributes "inputs" and "results" name the tensor that each
 * buffer is, such as "q,k,v,g,beta,state"; a+b is one buffer that is two of them. Every other attribute is a scalar of the
 * argument struct. A result with the name of an input is that input, which XLA has to have put in the same memory. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "linattn.h"

typedef struct Extension {
    size_t size;
    int type;
    struct Extension *next;
} Extension;
typedef struct {
    size_t size;
    Extension *extension;
    int major, minor;
} Version;
typedef struct {
    size_t size;
    Version version;
    uint32_t traits;
} Metadata;
typedef struct {
    Extension base;
    Metadata *metadata;
} MetadataExtension;
typedef struct {
    size_t size;
    Extension *extension;
    int dtype;
    void *data;
    int64_t rank;
    int64_t *dims;
} Buffer;
typedef struct {
    const char *at;
    size_t length;
} Span;
typedef struct {
    int dtype;
    void *value;
} Scalar;
typedef struct {
    size_t size;
    Extension *extension;
    int64_t count;
    int *types;
    void **items;
} Buffers; /* arguments or results */
typedef struct {
    size_t size;
    Extension *extension;
    int64_t count;
    int *types;
    Span **names;
    void **items;
} Attributes;
typedef struct {
    size_t size;
    Extension *extension;
    const struct Api *api;
    void *context;
    int stage;
    Buffers arguments, results;
    Attributes attributes;
} Call;
typedef struct {
    size_t size;
    Extension *extension;
    const char *message;
    int code;
} ErrorCreate;
typedef struct {
    size_t size;
    Extension *extension;
    void *context;
    void *stream;
} StreamGet;
typedef struct {
    size_t size;
    Extension *extension;
    void *context;
    int32_t ordinal;
} OrdinalGet;
typedef struct Api {
    size_t size;
    Extension *extension;
    Version version;
    const void *internal;
    void *(*error_create)(ErrorCreate *);
    void *between_error_and_stream[3];
    void *(*stream_get)(StreamGet *);
    void *between_stream_and_ordinal[12];
    void *(*ordinal_get)(OrdinalGet *);
} Api;
enum { kMetadataExtension = 1, kCommandBufferCompatible = 1 };
enum { kAttributeScalar = 3, kAttributeString = 4 };
enum { kS32 = 4, kS64 = 5, kU8 = 6, kF16 = 10, kF32 = 11, kF64 = 12, kBf16 = 16 };
enum { kInvalidArgument = 3, kUnimplemented = 12, kInternal = 13 };

typedef enum { kTensor, kInt32, kDouble } Kind;
typedef struct {
    const char *name;
    size_t offset;
    Kind kind;
} Field;
typedef union {
    linattn_gdn_fwd_args gdn_fwd;
    linattn_kda_fwd_args kda_fwd;
    linattn_gdn_decode_args gdn_decode;
    linattn_kda_decode_args kda_decode;
    linattn_gdn_verify_args gdn_verify;
    linattn_kda_verify_args kda_verify;
    linattn_delta_commit_args delta_commit;
    linattn_gdn_bwd_args gdn_bwd;
    linattn_kda_bwd_args kda_bwd;
    linattn_gdn_segment_args gdn_segment;
    linattn_kda_segment_args kda_segment;
    linattn_segment_merge_args segment_merge;
} Args;
typedef struct {
    const char *name;
    uint64_t size;
    size_t stream, checked;
    int64_t rank; /* of its first tensor */
    linattn_status (*run)(const Args *);
    const Field *fields;
    size_t count;
} Op;

static void *fail(const Call *call, int code, const char *text) {
    ErrorCreate error = {sizeof error, NULL, text, code};
    return call->api->error_create(&error);
}

static void *fail_about(const Call *call, const Op *op, const char *text, const char *name, size_t length) {
    char message[256];
    snprintf(message, sizeof message, "%s: %s %.*s", op->name, text, (int)length, name);
    return fail(call, kInternal, message);
}

static const Field *find(const Op *op, const char *name, size_t length) {
    for (size_t i = 0; i < op->count; ++i)
        if (strlen(op->fields[i].name) == length && memcmp(op->fields[i].name, name, length) == 0) return op->fields + i;
    return NULL;
}

static int32_t dtype_of(int dtype) {
    switch (dtype) {
        case kF32: return LINATTN_F32;
        case kF64: return LINATTN_F64;
        case kBf16: return LINATTN_BF16;
        case kF16: return LINATTN_F16;
        case kS32: return LINATTN_I32;
        case kS64: return LINATTN_I64;
        case kU8: return LINATTN_U8;
        default: return 0; /* which linattn_* refuses, naming the argument */
    }
}

/* XLA lays arrays out row-major. vmap puts `batch` axes in front of every array, which become part of the first one. */
static int describe(const Buffer *buffer, int64_t batch, int32_t device_type, int32_t device_id, linattn_tensor *tensor) {
    if (buffer->rank <= batch || buffer->rank - batch > 5) return 0;
    memset(tensor, 0, sizeof *tensor);
    tensor->ndim = (int32_t)(buffer->rank - batch);
    tensor->shape[0] = 1;
    for (int64_t axis = 0; axis <= batch; ++axis) tensor->shape[0] *= buffer->dims[axis];
    for (int axis = 1; axis < tensor->ndim; ++axis) tensor->shape[axis] = buffer->dims[batch + axis];
    int64_t stride = 1;
    for (int axis = tensor->ndim - 1; axis >= 0; stride *= tensor->shape[axis--]) tensor->strides[axis] = stride;
    tensor->data = stride ? buffer->data : NULL; /* XLA's address of an empty array means nothing */
    tensor->dtype = dtype_of(buffer->dtype);
    tensor->device_type = device_type;
    tensor->device_id = device_id;
    return 1;
}

static void *take_buffers(const Call *call, const Op *op, const Buffers *buffers, Span names, int64_t batch,
                          int32_t device_type, int32_t device_id, char *args) {
    const char *name = names.at, *end = names.at + names.length;
    for (int64_t i = 0; i < buffers->count; ++i) {
        int more = 1;
        while (more) {
            const char *stop = name;
            while (stop < end && *stop != ',' && *stop != '+') ++stop;
            size_t length = (size_t)(stop - name);
            const Field *field = find(op, name, length);
            if (!field || field->kind != kTensor) return fail_about(call, op, "there is no tensor", name, length);
            linattn_tensor *tensor = (linattn_tensor *)(args + field->offset), described;
            if (!describe(buffers->items[i], batch, device_type, device_id, &described))
                return fail_about(call, op, "arrays of 1 to 5 axes are accepted, not this", name, length);
            if (tensor->ndim && tensor->data != described.data)
                return fail_about(call, op, "XLA did not alias the result", name, length);
            *tensor = described;
            more = stop < end && *stop == '+';
            name = stop < end ? stop + 1 : end;
        }
    }
    return name == end ? NULL : fail_about(call, op, "there is no buffer for", name, (size_t)(end - name));
}

static void *take_attributes(const Call *call, const Op *op, char *args, Span *inputs, Span *results) {
    const Attributes *attributes = &call->attributes;
    for (int64_t i = 0; i < attributes->count; ++i) {
        const Span *name = attributes->names[i];
        int is_inputs = name->length == 6 && memcmp(name->at, "inputs", 6) == 0;
        int is_results = name->length == 7 && memcmp(name->at, "results", 7) == 0;
        if (attributes->types[i] == kAttributeString && (is_inputs || is_results)) {
            *(is_inputs ? inputs : results) = *(const Span *)attributes->items[i];
            continue;
        }
        const Field *field = find(op, name->at, name->length);
        const Scalar *scalar = attributes->items[i];
        int is_scalar = attributes->types[i] == kAttributeScalar && field;
        if (is_scalar && field->kind == kInt32 && scalar->dtype == kS32)
            memcpy(args + field->offset, scalar->value, sizeof(int32_t));
        else if (is_scalar && field->kind == kDouble && scalar->dtype == kF64)
            memcpy(args + field->offset, scalar->value, sizeof(double));
        else
            return fail_about(call, op, "there is no such option, or not of this type:", name->at, name->length);
    }
    return NULL;
}

static void *handle(Call *call, const Op *op, int32_t device_type) {
    for (Extension *extension = call->extension; extension; extension = extension->next)
        if (extension->type == kMetadataExtension) { /* XLA registers the handler and asks what it was written for */
            Metadata *metadata = ((MetadataExtension *)extension)->metadata;
            metadata->version.major = 0;
            metadata->version.minor = 1;
            metadata->traits = device_type == LINATTN_CUDA ? kCommandBufferCompatible : 0;
            return NULL;
        }

    Args storage;
    char *args = (char *)&storage;
    memset(&storage, 0, sizeof storage);
    memcpy(args, &op->size, sizeof op->size);
    int32_t device_id = 0;
    void *error;
    if (device_type == LINATTN_CUDA) {
        StreamGet stream = {sizeof stream, NULL, call->context, NULL};
        if ((error = call->api->stream_get(&stream))) return error;
        memcpy(args + op->stream, &stream.stream, sizeof(void *));
        if (call->api->size < offsetof(Api, ordinal_get) + sizeof(void *))
            return fail(call, kUnimplemented, "this jaxlib does not tell which GPU a call is for; a newer one is needed");
        OrdinalGet ordinal = {sizeof ordinal, NULL, call->context, 0};
        if ((error = call->api->ordinal_get(&ordinal))) return error;
        device_id = ordinal.ordinal;
    }
    Span inputs = {"", 0}, results = {"", 0};
    if ((error = take_attributes(call, op, args, &inputs, &results))) return error;
    int32_t checked;
    memcpy(&checked, args + op->checked, sizeof checked);
    if (checked && device_type == LINATTN_CUDA)
        return fail(call, kUnimplemented, "checked: it synchronises, which XLA does not allow on a GPU; call without it");
    int64_t batch = call->arguments.count ? ((const Buffer *)call->arguments.items[0])->rank - op->rank : 0;
    batch = batch < 0 ? 0 : batch;
    if ((error = take_buffers(call, op, &call->arguments, inputs, batch, device_type, device_id, args))) return error;
    if ((error = take_buffers(call, op, &call->results, results, batch, device_type, device_id, args))) return error;

    switch (op->run(&storage)) {
        case LINATTN_OK: return NULL;
        case LINATTN_ERR_VALUE:
        case LINATTN_ERR_TYPE: return fail(call, kInvalidArgument, linattn_last_error());
        case LINATTN_ERR_UNSUPPORTED: return fail(call, kUnimplemented, linattn_last_error());
        default: return fail(call, kInternal, linattn_last_error());
    }
}

#define FIELD(op, field, kind) {#field, offsetof(linattn_##op##_args, field), kind}
#define TENSOR(op, field) FIELD(op, field, kTensor)
#define INT32(op, field) FIELD(op, field, kInt32)
#define DELTA_FIELDS(op)                                                                                                  \
    TENSOR(op, q), TENSOR(op, k), TENSOR(op, v), TENSOR(op, g), TENSOR(op, beta), TENSOR(op, A_log), TENSOR(op, dt_bias), \
        TENSOR(op, workspace), FIELD(op, scale, kDouble), FIELD(op, lower_bound, kDouble), INT32(op, qk_l2norm),          \
        INT32(op, gate), INT32(op, beta_form), INT32(op, checked)
#define FWD_FIELDS(op)                                                                                                        \
    DELTA_FIELDS(op), TENSOR(op, initial_state), TENSOR(op, cu_seqlens), TENSOR(op, read_indices), TENSOR(op, write_indices), \
        TENSOR(op, checkpoint_indices), TENSOR(op, o), TENSOR(op, final_state), TENSOR(op, checkpoints),                      \
        INT32(op, checkpoint_every), INT32(op, splits), INT32(op, zero_tail)
#define DECODE_FIELDS(op)                                                                                             \
    DELTA_FIELDS(op), TENSOR(op, state), TENSOR(op, cu_seqlens), TENSOR(op, read_indices), TENSOR(op, write_indices), \
        TENSOR(op, o), INT32(op, zero_tail)
#define VERIFY_FIELDS(op)                                                                                          \
    DELTA_FIELDS(op), TENSOR(op, state), TENSOR(op, read_indices), TENSOR(op, write_indices), TENSOR(op, parents), \
        TENSOR(op, o), TENSOR(op, kept_k), TENSOR(op, kept_u), TENSOR(op, kept_g)
#define COMMIT_FIELDS(op)                                                                                   \
    TENSOR(op, state), TENSOR(op, k), TENSOR(op, u), TENSOR(op, g), TENSOR(op, accepted), TENSOR(op, path), \
        TENSOR(op, read_indices), TENSOR(op, write_indices), TENSOR(op, workspace), INT32(op, checked)
#define BWD_FIELDS(op)                                                                                                  \
    DELTA_FIELDS(op), TENSOR(op, d_o), TENSOR(op, initial_state), TENSOR(op, d_final_state), TENSOR(op, cu_seqlens),    \
        TENSOR(op, dq), TENSOR(op, dk), TENSOR(op, dv), TENSOR(op, dg), TENSOR(op, dbeta), TENSOR(op, d_initial_state), \
        TENSOR(op, dA_log), TENSOR(op, ddt_bias), INT32(op, splits)

#define SEGMENT_FIELDS(op) \
    DELTA_FIELDS(op), TENSOR(op, d_o), TENSOR(op, cu_seqlens), TENSOR(op, M), TENSOR(op, h), INT32(op, direction)
#define MERGE_FIELDS(op)                                                                                  \
    TENSOR(op, M), TENSOR(op, h), TENSOR(op, initial_state), TENSOR(op, states), TENSOR(op, final_state), \
        TENSOR(op, workspace), INT32(op, direction), INT32(op, checked)

#define HANDLER(op, fields, rank)                                                                        \
    static const Field fields_of_##op[] = {fields(op)};                                                  \
    static linattn_status run_##op(const Args *args) { return linattn_##op(&args->op); }                 \
    static const Op op_##op = {#op,                                                                      \
                               sizeof(linattn_##op##_args),                                              \
                               offsetof(linattn_##op##_args, stream),                                    \
                               offsetof(linattn_##op##_args, checked),                                   \
                               rank,                                                                     \
                               run_##op,                                                                 \
                               fields_of_##op,                                                           \
                               sizeof fields_of_##op / sizeof(Field)};                                   \
    LINATTN_API void *linattn_xla_##op##_cpu(Call *call) { return handle(call, &op_##op, LINATTN_CPU); } \
    LINATTN_API void *linattn_xla_##op##_cuda(Call *call) { return handle(call, &op_##op, LINATTN_CUDA); }

HANDLER(gdn_fwd, FWD_FIELDS, 4)
HANDLER(kda_fwd, FWD_FIELDS, 4)
HANDLER(gdn_decode, DECODE_FIELDS, 4)
HANDLER(kda_decode, DECODE_FIELDS, 4)
HANDLER(gdn_verify, VERIFY_FIELDS, 4)
HANDLER(kda_verify, VERIFY_FIELDS, 4)
HANDLER(delta_commit, COMMIT_FIELDS, 4)
HANDLER(gdn_bwd, BWD_FIELDS, 4)
HANDLER(kda_bwd, BWD_FIELDS, 4)
HANDLER(gdn_segment, SEGMENT_FIELDS, 4)
HANDLER(kda_segment, SEGMENT_FIELDS, 4)
HANDLER(segment_merge, MERGE_FIELDS, 5)
