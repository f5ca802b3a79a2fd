/* linattn.h: the C interface of pylinattn, kernels for gated delta-rule linear attention.
 *
 *   GDN  Gated DeltaNet, one decay per head and token      (Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464)
 *   KDA  Kimi Delta Attention, one decay per key channel   (Kimi Team 2025, arXiv:2510.26692)
 *
 * The recurrence, per sequence and value head, S in R^{K x V}, decay first:
 *
 *   S = exp(g) S;   u = beta (v - S^T k);   S = S + k u^T;   o = scale S^T q
 *
 * Every op takes one struct. Zero the struct, set `size` to sizeof the struct, fill in what the op needs.
 * A tensor left zeroed (ndim = 0) is "not given". The comment behind each field has a fixed form, which the tests read:
 *
 *   in | in? | out | out? | inout    a question mark means that it may be left out
 *   [B,T,H,K]                        shape; a letter means the same size wherever it appears, `scalar` a plain number
 *   bf16|f16|f32|f64                 accepted dtypes; `=q` is the dtype of q
 *
 * Sizes: B batch, T tokens (in all, when packed), N sequences, H query/key heads, HV value heads (a multiple of H; value
 * head j reads q/k head j / (HV/H)), K and V head sizes, P and F rows of a state pool, R segments.
 * N is B, or with cu_seqlens (packed sequences, B = 1) one less than its length.
 * Without index tables a pool has exactly N rows, row n for sequence n.
 *
 * Units and conventions, the same for every op:
 *   g            natural logarithm of the decay, <= 0; -inf is a full reset. A raw gate input when `gate` says so.
 *   state        [rows,HV,K,V]; either order of the last two strides (a "V-first" buffer is a transposed view), any row stride.
 *   read row -1  padding: the sequence reads nothing and writes nothing, its output rows are zeroed.
 *   write row -1 the sequence is computed, its state is not written.
 *   Rows outside the pool are refused where the host can read them (CPU, or `checked`), elsewhere treated as -1.
 *   cu_seqlens   starts at 0 and never falls; on a GPU values are clamped to [0,T]. Rows of o past its last value stay as they
 *                were, or are zeroed with `zero_tail`; so do rows of checkpoints past those of the last sequence.
 *
 * Errors: every function returns a status; linattn_last_error() then holds one sentence: op, argument, expected, got.
 * Every error that can be found is found before the first launch and leaves every buffer as it was.
 * Threads: all functions may be called from any thread. Lifetime: nothing is kept after return but what was launched on the
 * stream, for which the caller keeps the buffers alive. Memory: the caller owns all of it, workspace included.
 * GPU calls launch on `stream` and return; they neither synchronise nor allocate (`checked` synchronises).
 */
#ifndef LINATTN_H
#define LINATTN_H

#include <stddef.h>
#include <stdint.h>

#if defined(LINATTN_BUILD)
#define LINATTN_API __attribute__((visibility("default")))
#else
#define LINATTN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

struct DLTensor; /* dlpack.h */

/* [cdef.begin]  plain C only from here: the Python binding is generated from this text */
#define LINATTN_ABI_VERSION 0x00010000 /* major << 16 | minor; fields are only ever appended within a major version */

typedef enum {
    LINATTN_OK = 0,
    LINATTN_ERR_VALUE = 1,       /* shape, stride, alignment, range, overlap  -> ValueError          */
    LINATTN_ERR_TYPE = 2,        /* dtype or device                           -> TypeError           */
    LINATTN_ERR_UNSUPPORTED = 3, /* legal, but there is no kernel for it      -> NotImplementedError */
    LINATTN_ERR_RUNTIME = 4      /* CUDA, memory or an internal failure       -> RuntimeError        */
} linattn_status;

typedef enum {
    LINATTN_F32 = 1,
    LINATTN_F64 = 2,
    LINATTN_BF16 = 3,
    LINATTN_F16 = 4,
    LINATTN_I32 = 5,
    LINATTN_I64 = 6,
    LINATTN_U8 = 7
} linattn_dtype;

typedef enum { LINATTN_CPU = 1, LINATTN_CUDA = 2 } linattn_device_type; /* DLPack's numbers */

typedef enum {
    LINATTN_GATE_NONE = 0,     /* g is the log decay                                                                     */
    LINATTN_GATE_SOFTPLUS = 1, /* -exp(A_log) softplus(g + dt_bias)                                                      */
    LINATTN_GATE_BOUNDED = 2   /* lower_bound sigmoid(exp(A_log) (g + dt_bias)); without A_log the factor exp(A_log) is 1 */
} linattn_gate;

typedef enum {
    LINATTN_BETA_WEIGHT = 0,   /* beta is the write strength, in [0,2]                       */
    LINATTN_BETA_LOGITS = 1,   /* sigmoid(beta)                                              */
    LINATTN_BETA_LOGITS_X2 = 2 /* 2 sigmoid(beta): lets the transition have negative eigenvalues */
} linattn_beta_form;

/* NOTHING: the backward recomputes from its inputs. STATES: the forward fills `saved`, linattn_{gdn,kda}_fwd_saved() bytes, which the
 * backward of the same arguments reads: less work there, in all a faster step, for memory. It is opaque, may be copied, and belongs to
 * device, library version, shapes, options and contents of the forward's call. Per token (a last chunk of 64 of a sequence counts whole;
 * packed, a sequence counts one more): on a GPU, GDN alone, 2 K V / 64 + 2 V + 309 bytes for each value head and 4 K for each of H, at
 * K = V = 128 1077 and 512; on the CPU K V / 64 elements of float (double for double q) for each value head. Not with read_indices,
 * write_indices, checkpoints or a final_state that is initial_state itself. On a GPU outputs are as accurate as without, but their last
 * bits may depend on later tokens of the sequence. */
typedef enum { LINATTN_SAVE_NOTHING = 0, LINATTN_SAVE_STATES = 1 } linattn_save;
typedef enum { LINATTN_FORWARD = 0, LINATTN_BACKWARD = 1 } linattn_direction;
typedef enum { LINATTN_READ_ONLY = 1 } linattn_tensor_flags; /* refused as an output */

typedef struct {
    void *data;          /* first element; may be NULL where a size is 0 */
    int64_t shape[5];
    int64_t strides[5];  /* in elements; any sign on the CPU */
    int32_t ndim;        /* 0: not given */
    int32_t dtype;       /* linattn_dtype */
    int32_t device_type; /* linattn_device_type */
    int32_t device_id;
    uint32_t flags;      /* linattn_tensor_flags */
    uint32_t reserved;   /* 0 */
} linattn_tensor;

/* Gated delta rule over whole sequences: prefill and training forward. arXiv:2412.06464. */
typedef struct {
    uint64_t size;                     /* sizeof(linattn_gdn_fwd_args) */
    linattn_tensor q;                  /* in    [B,T,H,K]   bf16|f16|f32|f64  queries, of norm <= 1 unless qk_l2norm */
    linattn_tensor k;                  /* in    [B,T,H,K]   =q                keys, of norm <= 1 unless qk_l2norm */
    linattn_tensor v;                  /* in    [B,T,HV,V]  =q                values */
    linattn_tensor g;                  /* in    [B,T,HV]    f32|bf16|f16|f64  log decay per token, <= 0, or raw gate input */
    linattn_tensor beta;               /* in    [B,T,HV]    f32|bf16|f16|f64  write strength, or its logits */
    linattn_tensor initial_state;      /* in?   [P,HV,K,V]  f32|bf16|f64      state before token 0, zeros if not given; a pool with read_indices */
    linattn_tensor cu_seqlens;         /* in?   [N+1]       i32|i64           where each packed sequence starts, and the end; B is 1 */
    linattn_tensor A_log;              /* in?   [HV]        f32|bf16|f64      log of the gate's amplitude; for gate */
    linattn_tensor dt_bias;            /* in?   [HV]        f32|bf16|f64      added to the raw gate input; for gate */
    linattn_tensor read_indices;       /* in?   [N]         i32|i64           row of initial_state per sequence; -1 is padding */
    linattn_tensor write_indices;      /* in?   [N]         i32|i64           row of final_state per sequence, -1 writes nothing; not given: read_indices if final_state is initial_state itself, else row n */
    linattn_tensor checkpoint_indices; /* in?   [N,M]       i32|i64           row of checkpoints for the m-th checkpoint of a sequence, -1 skips it; not given: rows in order, sequence after sequence */
    linattn_tensor o;                  /* out   [B,T,HV,V]  =q                outputs */
    linattn_tensor final_state;        /* out?  [F,HV,K,V]  f32|bf16|f64      state after the last token; may be initial_state itself */
    linattn_tensor checkpoints;        /* out?  [C,HV,K,V]  f32|bf16|f64      state after every checkpoint_every tokens of each sequence; rows past C are dropped */
    linattn_tensor saved;              /* out?  [S]         u8                what the backward reads, see save */
    linattn_tensor workspace;          /* out?  [W]         u8                scratch, linattn_gdn_fwd_workspace() bytes */
    double scale;                      /* in    scalar      f64               multiplies q, usually K^-0.5; not 0 */
    double lower_bound;                /* in    scalar      f64               for LINATTN_GATE_BOUNDED, < 0 */
    int32_t qk_l2norm;                 /* in    scalar      i32               1: q and k are divided by sqrt(sum x^2 + 1e-6) first */
    int32_t gate;                      /* in    scalar      i32               linattn_gate */
    int32_t beta_form;                 /* in    scalar      i32               linattn_beta_form */
    int32_t checkpoint_every;          /* in    scalar      i32               a multiple of 64, or 0 for no checkpoints */
    int32_t save;                      /* in    scalar      i32               linattn_save */
    int32_t splits;                    /* in    scalar      i32               pieces per sequence inside the card, 0 chooses, 1 is none */
    int32_t checked;                   /* in    scalar      i32               1: synchronise and test values too (lengths, indices, g <= 0) */
    int32_t zero_tail;                 /* in    scalar      i32               1: zero rows of o past cu_seqlens[N], 2: of checkpoints that no sequence has, 3: both */
    void *stream;                      /* in    scalar      ptr               cudaStream_t, NULL is the default stream; ignored on the CPU */
} linattn_gdn_fwd_args;

/* Kimi delta attention over whole sequences: prefill and training forward. arXiv:2510.26692. */
typedef struct {
    uint64_t size;                     /* sizeof(linattn_kda_fwd_args) */
    linattn_tensor q;                  /* in    [B,T,H,K]   bf16|f16|f32|f64  queries, of norm <= 1 unless qk_l2norm */
    linattn_tensor k;                  /* in    [B,T,H,K]   =q                keys, of norm <= 1 unless qk_l2norm */
    linattn_tensor v;                  /* in    [B,T,HV,V]  =q                values */
    linattn_tensor g;                  /* in    [B,T,HV,K]  f32|bf16|f16|f64  log decay per token and key channel, <= 0, or raw gate input */
    linattn_tensor beta;               /* in    [B,T,HV]    f32|bf16|f16|f64  write strength, or its logits */
    linattn_tensor initial_state;      /* in?   [P,HV,K,V]  f32|bf16|f64      state before token 0, zeros if not given; a pool with read_indices */
    linattn_tensor cu_seqlens;         /* in?   [N+1]       i32|i64           where each packed sequence starts, and the end; B is 1 */
    linattn_tensor A_log;              /* in?   [HV]        f32|bf16|f64      log of the gate's amplitude; for gate */
    linattn_tensor dt_bias;            /* in?   [HV,K]      f32|bf16|f64      added to the raw gate input; for gate */
    linattn_tensor read_indices;       /* in?   [N]         i32|i64           row of initial_state per sequence; -1 is padding */
    linattn_tensor write_indices;      /* in?   [N]         i32|i64           row of final_state per sequence, -1 writes nothing; not given: read_indices if final_state is initial_state itself, else row n */
    linattn_tensor checkpoint_indices; /* in?   [N,M]       i32|i64           row of checkpoints for the m-th checkpoint of a sequence, -1 skips it; not given: rows in order, sequence after sequence */
    linattn_tensor o;                  /* out   [B,T,HV,V]  =q                outputs */
    linattn_tensor final_state;        /* out?  [F,HV,K,V]  f32|bf16|f64      state after the last token; may be initial_state itself */
    linattn_tensor checkpoints;        /* out?  [C,HV,K,V]  f32|bf16|f64      state after every checkpoint_every tokens of each sequence; rows past C are dropped */
    linattn_tensor saved;              /* out?  [S]         u8                what the backward reads, see save */
    linattn_tensor workspace;          /* out?  [W]         u8                scratch, linattn_kda_fwd_workspace() bytes */
    double scale;                      /* in    scalar      f64               multiplies q, usually K^-0.5; not 0 */
    double lower_bound;                /* in    scalar      f64               for LINATTN_GATE_BOUNDED, < 0 */
    int32_t qk_l2norm;                 /* in    scalar      i32               1: q and k are divided by sqrt(sum x^2 + 1e-6) first */
    int32_t gate;                      /* in    scalar      i32               linattn_gate */
    int32_t beta_form;                 /* in    scalar      i32               linattn_beta_form */
    int32_t checkpoint_every;          /* in    scalar      i32               a multiple of 64, or 0 for no checkpoints */
    int32_t save;                      /* in    scalar      i32               linattn_save */
    int32_t splits;                    /* in    scalar      i32               pieces per sequence inside the card, 0 chooses, 1 is none */
    int32_t checked;                   /* in    scalar      i32               1: synchronise and test values too (lengths, indices, g <= 0) */
    int32_t zero_tail;                 /* in    scalar      i32               1: zero rows of o past cu_seqlens[N], 2: of checkpoints that no sequence has, 3: both */
    void *stream;                      /* in    scalar      ptr               cudaStream_t, NULL is the default stream; ignored on the CPU */
} linattn_kda_fwd_args;

/* Gated delta rule, one or a few tokens per sequence against a pool of states, in place. arXiv:2412.06464. */
typedef struct {
    uint64_t size;                /* sizeof(linattn_gdn_decode_args) */
    linattn_tensor q;             /* in    [B,T,H,K]   bf16|f16|f32|f64  queries, of norm <= 1 unless qk_l2norm */
    linattn_tensor k;             /* in    [B,T,H,K]   =q                keys, of norm <= 1 unless qk_l2norm */
    linattn_tensor v;             /* in    [B,T,HV,V]  =q                values */
    linattn_tensor g;             /* in    [B,T,HV]    f32|bf16|f16|f64  log decay per token, <= 0, or raw gate input */
    linattn_tensor beta;          /* in    [B,T,HV]    f32|bf16|f16|f64  write strength, or its logits */
    linattn_tensor state;         /* inout [P,HV,K,V]  f32|bf16|f64      pool of states, read at read_indices and written at write_indices */
    linattn_tensor cu_seqlens;    /* in?   [N+1]       i32|i64           where each packed sequence starts, and the end; B is 1 */
    linattn_tensor A_log;         /* in?   [HV]        f32|bf16|f64      log of the gate's amplitude; for gate */
    linattn_tensor dt_bias;       /* in?   [HV]        f32|bf16|f64      added to the raw gate input; for gate */
    linattn_tensor read_indices;  /* in?   [N]         i32|i64           row of state per sequence; -1 is padding */
    linattn_tensor write_indices; /* in?   [N]         i32|i64           row of state to write per sequence, -1 writes nothing; not given: read_indices */
    linattn_tensor o;             /* out   [B,T,HV,V]  =q                outputs */
    linattn_tensor workspace;     /* out?  [W]         u8                scratch, linattn_gdn_decode_workspace() bytes */
    double scale;                 /* in    scalar      f64               multiplies q, usually K^-0.5; not 0 */
    double lower_bound;           /* in    scalar      f64               for LINATTN_GATE_BOUNDED, < 0 */
    int32_t qk_l2norm;            /* in    scalar      i32               1: q and k are divided by sqrt(sum x^2 + 1e-6) first */
    int32_t gate;                 /* in    scalar      i32               linattn_gate */
    int32_t beta_form;            /* in    scalar      i32               linattn_beta_form */
    int32_t checked;              /* in    scalar      i32               1: synchronise and test values too (lengths, indices, g <= 0) */
    int32_t zero_tail;            /* in    scalar      i32               1: zero the rows of o past cu_seqlens[N] */
    int32_t reserved;             /* in    scalar      i32               0 */
    void *stream;                 /* in    scalar      ptr               cudaStream_t, NULL is the default stream; ignored on the CPU */
} linattn_gdn_decode_args;

/* Kimi delta attention, one or a few tokens per sequence against a pool of states, in place. arXiv:2510.26692. */
typedef struct {
    uint64_t size;                /* sizeof(linattn_kda_decode_args) */
    linattn_tensor q;             /* in    [B,T,H,K]   bf16|f16|f32|f64  queries, of norm <= 1 unless qk_l2norm */
    linattn_tensor k;             /* in    [B,T,H,K]   =q                keys, of norm <= 1 unless qk_l2norm */
    linattn_tensor v;             /* in    [B,T,HV,V]  =q                values */
    linattn_tensor g;             /* in    [B,T,HV,K]  f32|bf16|f16|f64  log decay per token and key channel, <= 0, or raw gate input */
    linattn_tensor beta;          /* in    [B,T,HV]    f32|bf16|f16|f64  write strength, or its logits */
    linattn_tensor state;         /* inout [P,HV,K,V]  f32|bf16|f64      pool of states, read at read_indices and written at write_indices */
    linattn_tensor cu_seqlens;    /* in?   [N+1]       i32|i64           where each packed sequence starts, and the end; B is 1 */
    linattn_tensor A_log;         /* in?   [HV]        f32|bf16|f64      log of the gate's amplitude; for gate */
    linattn_tensor dt_bias;       /* in?   [HV,K]      f32|bf16|f64      added to the raw gate input; for gate */
    linattn_tensor read_indices;  /* in?   [N]         i32|i64           row of state per sequence; -1 is padding */
    linattn_tensor write_indices; /* in?   [N]         i32|i64           row of state to write per sequence, -1 writes nothing; not given: read_indices */
    linattn_tensor o;             /* out   [B,T,HV,V]  =q                outputs */
    linattn_tensor workspace;     /* out?  [W]         u8                scratch, linattn_kda_decode_workspace() bytes */
    double scale;                 /* in    scalar      f64               multiplies q, usually K^-0.5; not 0 */
    double lower_bound;           /* in    scalar      f64               for LINATTN_GATE_BOUNDED, < 0 */
    int32_t qk_l2norm;            /* in    scalar      i32               1: q and k are divided by sqrt(sum x^2 + 1e-6) first */
    int32_t gate;                 /* in    scalar      i32               linattn_gate */
    int32_t beta_form;            /* in    scalar      i32               linattn_beta_form */
    int32_t checked;              /* in    scalar      i32               1: synchronise and test values too (lengths, indices, g <= 0) */
    int32_t zero_tail;            /* in    scalar      i32               1: zero the rows of o past cu_seqlens[N] */
    int32_t reserved;             /* in    scalar      i32               0 */
    void *stream;                 /* in    scalar      ptr               cudaStream_t, NULL is the default stream; ignored on the CPU */
} linattn_kda_decode_args;

/* Gated delta rule, outputs of 1 to 16 drafted tokens per sequence, a chain or a tree, for speculative decoding.
 * The rows read are left as they are. kept_k, kept_u and kept_g are what linattn_delta_commit folds in later. With none of them
 * and no write_indices, outputs are as accurate as decode's; where something is kept, they have its bits. arXiv:2412.06464. */
typedef struct {
    uint64_t size;                /* sizeof(linattn_gdn_verify_args) */
    linattn_tensor q;             /* in    [B,T,H,K]   bf16|f16|f32|f64  queries, of norm <= 1 unless qk_l2norm */
    linattn_tensor k;             /* in    [B,T,H,K]   =q                keys, of norm <= 1 unless qk_l2norm */
    linattn_tensor v;             /* in    [B,T,HV,V]  =q                values */
    linattn_tensor g;             /* in    [B,T,HV]    f32|bf16|f16|f64  log decay per token, <= 0, or raw gate input */
    linattn_tensor beta;          /* in    [B,T,HV]    f32|bf16|f16|f64  write strength, or its logits */
    linattn_tensor state;         /* inout [P,HV,K,V]  f32|bf16|f64      pool of states, read at read_indices; written only at write_indices */
    linattn_tensor A_log;         /* in?   [HV]        f32|bf16|f64      log of the gate's amplitude; for gate */
    linattn_tensor dt_bias;       /* in?   [HV]        f32|bf16|f64      added to the raw gate input; for gate */
    linattn_tensor read_indices;  /* in?   [N]         i32|i64           row of state per sequence; -1 is padding */
    linattn_tensor write_indices; /* in?   [N,T]       i32|i64           row of state to write after each token, none of them read by this call; -1 writes nothing; not given: none is written */
    linattn_tensor parents;       /* in?   [N,T]       i32|i64           token that each token follows, smaller than its own number, -1 for the state; not given: a chain */
    linattn_tensor o;             /* out   [B,T,HV,V]  =q                outputs */
    linattn_tensor kept_k;        /* out?  [B,T,H,K]   f32|f64           keys as used, after qk_l2norm */
    linattn_tensor kept_u;        /* out?  [B,T,HV,V]  f32|f64           what each token writes: beta (v - S^T k) */
    linattn_tensor kept_g;        /* out?  [B,T,HV]    f32|f64           log decay as used, after gate; per token, so that -inf stays exact */
    linattn_tensor workspace;     /* out?  [W]         u8                scratch, linattn_gdn_verify_workspace() bytes */
    double scale;                 /* in    scalar      f64               multiplies q, usually K^-0.5; not 0 */
    double lower_bound;           /* in    scalar      f64               for LINATTN_GATE_BOUNDED, < 0 */
    int32_t qk_l2norm;            /* in    scalar      i32               1: q and k are divided by sqrt(sum x^2 + 1e-6) first */
    int32_t gate;                 /* in    scalar      i32               linattn_gate */
    int32_t beta_form;            /* in    scalar      i32               linattn_beta_form */
    int32_t checked;              /* in    scalar      i32               1: synchronise and test values too (lengths, indices, g <= 0) */
    void *stream;                 /* in    scalar      ptr               cudaStream_t, NULL is the default stream; ignored on the CPU */
} linattn_gdn_verify_args;

/* Kimi delta attention, outputs of 1 to 16 drafted tokens per sequence, a chain or a tree, for speculative decoding.
 * The rows read are left as they are. kept_k, kept_u and kept_g are what linattn_delta_commit folds in later. With none of them
 * and no write_indices, outputs are as accurate as decode's; where something is kept, they have its bits. arXiv:2510.26692. */
typedef struct {
    uint64_t size;                /* sizeof(linattn_kda_verify_args) */
    linattn_tensor q;             /* in    [B,T,H,K]   bf16|f16|f32|f64  queries, of norm <= 1 unless qk_l2norm */
    linattn_tensor k;             /* in    [B,T,H,K]   =q                keys, of norm <= 1 unless qk_l2norm */
    linattn_tensor v;             /* in    [B,T,HV,V]  =q                values */
    linattn_tensor g;             /* in    [B,T,HV,K]  f32|bf16|f16|f64  log decay per token and key channel, <= 0, or raw gate input */
    linattn_tensor beta;          /* in    [B,T,HV]    f32|bf16|f16|f64  write strength, or its logits */
    linattn_tensor state;         /* inout [P,HV,K,V]  f32|bf16|f64      pool of states, read at read_indices; written only at write_indices */
    linattn_tensor A_log;         /* in?   [HV]        f32|bf16|f64      log of the gate's amplitude; for gate */
    linattn_tensor dt_bias;       /* in?   [HV,K]      f32|bf16|f64      added to the raw gate input; for gate */
    linattn_tensor read_indices;  /* in?   [N]         i32|i64           row of state per sequence; -1 is padding */
    linattn_tensor write_indices; /* in?   [N,T]       i32|i64           row of state to write after each token, none of them read by this call; -1 writes nothing; not given: none is written */
    linattn_tensor parents;       /* in?   [N,T]       i32|i64           token that each token follows, smaller than its own number, -1 for the state; not given: a chain */
    linattn_tensor o;             /* out   [B,T,HV,V]  =q                outputs */
    linattn_tensor kept_k;        /* out?  [B,T,H,K]   f32|f64           keys as used, after qk_l2norm */
    linattn_tensor kept_u;        /* out?  [B,T,HV,V]  f32|f64           what each token writes: beta (v - S^T k) */
    linattn_tensor kept_g;        /* out?  [B,T,HV,K]  f32|f64           log decay as used, after gate; per token, so that -inf stays exact */
    linattn_tensor workspace;     /* out?  [W]         u8                scratch, linattn_kda_verify_workspace() bytes */
    double scale;                 /* in    scalar      f64               multiplies q, usually K^-0.5; not 0 */
    double lower_bound;           /* in    scalar      f64               for LINATTN_GATE_BOUNDED, < 0 */
    int32_t qk_l2norm;            /* in    scalar      i32               1: q and k are divided by sqrt(sum x^2 + 1e-6) first */
    int32_t gate;                 /* in    scalar      i32               linattn_gate */
    int32_t beta_form;            /* in    scalar      i32               linattn_beta_form */
    int32_t checked;              /* in    scalar      i32               1: synchronise and test values too (lengths, indices, g <= 0) */
    void *stream;                 /* in    scalar      ptr               cudaStream_t, NULL is the default stream; ignored on the CPU */
} linattn_kda_verify_args;

/* Fold the first accepted[n] drafted tokens into the states: S = exp(g) S + k u^T for each, in order. GDN and KDA alike. */
typedef struct {
    uint64_t size;                /* sizeof(linattn_delta_commit_args) */
    linattn_tensor state;         /* inout [P,HV,K,V]           f32|bf16|f64  pool of states, read at read_indices and written at write_indices */
    linattn_tensor k;             /* in    [B,T,H,K]            f32|f64       kept_k of the verify call */
    linattn_tensor u;             /* in    [B,T,HV,V]           =k            kept_u of the verify call */
    linattn_tensor g;             /* in    [B,T,HV]|[B,T,HV,K]  =k            kept_g of the verify call */
    linattn_tensor accepted;      /* in    [N]                  i32|i64       tokens to fold in; clamped to 0 .. T */
    linattn_tensor path;          /* in?   [N,T]                i32|i64       number of the j-th accepted token of a tree; not given: 0, 1, 2, .. */
    linattn_tensor read_indices;  /* in?   [N]                  i32|i64       row of state per sequence; -1 is padding */
    linattn_tensor write_indices; /* in?   [N]                  i32|i64       row of state to write per sequence, -1 writes nothing; not given: read_indices */
    linattn_tensor workspace;     /* out?  [W]                  u8            scratch, linattn_delta_commit_workspace() bytes */
    int32_t checked;              /* in    scalar               i32           1: synchronise and test values too (lengths, indices, g <= 0) */
    int32_t reserved;             /* in    scalar               i32           0 */
    void *stream;                 /* in    scalar               ptr           cudaStream_t, NULL is the default stream; ignored on the CPU */
} linattn_delta_commit_args;

/* Gated delta rule, every gradient of the forward over whole sequences. arXiv:2412.06464. */
typedef struct {
    uint64_t size;                  /* sizeof(linattn_gdn_bwd_args) */
    linattn_tensor q;               /* in    [B,T,H,K]   bf16|f16|f32|f64  queries, of norm <= 1 unless qk_l2norm */
    linattn_tensor k;               /* in    [B,T,H,K]   =q                keys, of norm <= 1 unless qk_l2norm */
    linattn_tensor v;               /* in    [B,T,HV,V]  =q                values */
    linattn_tensor g;               /* in    [B,T,HV]    f32|bf16|f16|f64  log decay per token, <= 0, or raw gate input */
    linattn_tensor beta;            /* in    [B,T,HV]    f32|bf16|f16|f64  write strength, or its logits */
    linattn_tensor d_o;             /* in    [B,T,HV,V]  =q                gradient of o */
    linattn_tensor initial_state;   /* in?   [N,HV,K,V]  f32|bf16|f64      as in the forward */
    linattn_tensor d_final_state;   /* in?   [N,HV,K,V]  f32|bf16|f64      gradient of final_state, zeros if not given */
    linattn_tensor cu_seqlens;      /* in?   [N+1]       i32|i64           where each packed sequence starts, and the end; B is 1 */
    linattn_tensor A_log;           /* in?   [HV]        f32|bf16|f64      log of the gate's amplitude; for gate */
    linattn_tensor dt_bias;         /* in?   [HV]        f32|bf16|f64      added to the raw gate input; for gate */
    linattn_tensor saved;           /* in?   [S]         u8                what the forward saved; for save */
    linattn_tensor dq;              /* out   [B,T,H,K]   =q                gradient of q */
    linattn_tensor dk;              /* out   [B,T,H,K]   =q                gradient of k */
    linattn_tensor dv;              /* out   [B,T,HV,V]  =q                gradient of v */
    linattn_tensor dg;              /* out   [B,T,HV]    f32|bf16|f16|f64  gradient of g */
    linattn_tensor dbeta;           /* out   [B,T,HV]    f32|bf16|f16|f64  gradient of beta */
    linattn_tensor d_initial_state; /* out?  [N,HV,K,V]  f32|bf16|f64      gradient of initial_state */
    linattn_tensor dA_log;          /* out?  [HV]        f32|bf16|f64      gradient of A_log */
    linattn_tensor ddt_bias;        /* out?  [HV]        f32|bf16|f64      gradient of dt_bias */
    linattn_tensor workspace;       /* out?  [W]         u8                scratch, linattn_gdn_bwd_workspace() bytes */
    double scale;                   /* in    scalar      f64               multiplies q, usually K^-0.5; not 0 */
    double lower_bound;             /* in    scalar      f64               for LINATTN_GATE_BOUNDED, < 0 */
    int32_t qk_l2norm;              /* in    scalar      i32               1: q and k are divided by sqrt(sum x^2 + 1e-6) first */
    int32_t gate;                   /* in    scalar      i32               linattn_gate */
    int32_t beta_form;              /* in    scalar      i32               linattn_beta_form */
    int32_t save;                   /* in    scalar      i32               linattn_save, as in the forward */
    int32_t splits;                 /* in    scalar      i32               pieces per sequence inside the card, 0 chooses, 1 is none */
    int32_t checked;                /* in    scalar      i32               1: synchronise and test values too (lengths, indices, g <= 0) */
    void *stream;                   /* in    scalar      ptr               cudaStream_t, NULL is the default stream; ignored on the CPU */
} linattn_gdn_bwd_args;

/* Kimi delta attention, every gradient of the forward over whole sequences. arXiv:2510.26692. */
typedef struct {
    uint64_t size;                  /* sizeof(linattn_kda_bwd_args) */
    linattn_tensor q;               /* in    [B,T,H,K]   bf16|f16|f32|f64  queries, of norm <= 1 unless qk_l2norm */
    linattn_tensor k;               /* in    [B,T,H,K]   =q                keys, of norm <= 1 unless qk_l2norm */
    linattn_tensor v;               /* in    [B,T,HV,V]  =q                values */
    linattn_tensor g;               /* in    [B,T,HV,K]  f32|bf16|f16|f64  log decay per token and key channel, <= 0, or raw gate input */
    linattn_tensor beta;            /* in    [B,T,HV]    f32|bf16|f16|f64  write strength, or its logits */
    linattn_tensor d_o;             /* in    [B,T,HV,V]  =q                gradient of o */
    linattn_tensor initial_state;   /* in?   [N,HV,K,V]  f32|bf16|f64      as in the forward */
    linattn_tensor d_final_state;   /* in?   [N,HV,K,V]  f32|bf16|f64      gradient of final_state, zeros if not given */
    linattn_tensor cu_seqlens;      /* in?   [N+1]       i32|i64           where each packed sequence starts, and the end; B is 1 */
    linattn_tensor A_log;           /* in?   [HV]        f32|bf16|f64      log of the gate's amplitude; for gate */
    linattn_tensor dt_bias;         /* in?   [HV,K]      f32|bf16|f64      added to the raw gate input; for gate */
    linattn_tensor saved;           /* in?   [S]         u8                what the forward saved; for save */
    linattn_tensor dq;              /* out   [B,T,H,K]   =q                gradient of q */
    linattn_tensor dk;              /* out   [B,T,H,K]   =q                gradient of k */
    linattn_tensor dv;              /* out   [B,T,HV,V]  =q                gradient of v */
    linattn_tensor dg;              /* out   [B,T,HV,K]  f32|bf16|f16|f64  gradient of g */
    linattn_tensor dbeta;           /* out   [B,T,HV]    f32|bf16|f16|f64  gradient of beta */
    linattn_tensor d_initial_state; /* out?  [N,HV,K,V]  f32|bf16|f64      gradient of initial_state */
    linattn_tensor dA_log;          /* out?  [HV]        f32|bf16|f64      gradient of A_log */
    linattn_tensor ddt_bias;        /* out?  [HV,K]      f32|bf16|f64      gradient of dt_bias */
    linattn_tensor workspace;       /* out?  [W]         u8                scratch, linattn_kda_bwd_workspace() bytes */
    double scale;                   /* in    scalar      f64               multiplies q, usually K^-0.5; not 0 */
    double lower_bound;             /* in    scalar      f64               for LINATTN_GATE_BOUNDED, < 0 */
    int32_t qk_l2norm;              /* in    scalar      i32               1: q and k are divided by sqrt(sum x^2 + 1e-6) first */
    int32_t gate;                   /* in    scalar      i32               linattn_gate */
    int32_t beta_form;              /* in    scalar      i32               linattn_beta_form */
    int32_t save;                   /* in    scalar      i32               linattn_save, as in the forward */
    int32_t splits;                 /* in    scalar      i32               pieces per sequence inside the card, 0 chooses, 1 is none */
    int32_t checked;                /* in    scalar      i32               1: synchronise and test values too (lengths, indices, g <= 0) */
    void *stream;                   /* in    scalar      ptr               cudaStream_t, NULL is the default stream; ignored on the CPU */
} linattn_kda_bwd_args;

/* Gated delta rule, the affine map of a span of tokens, S_out = M S_in + h; or backward, dS_in = M dS_out + h,
 * M transposed already. For context parallelism over devices. arXiv:2412.06464. */
typedef struct {
    uint64_t size;             /* sizeof(linattn_gdn_segment_args) */
    linattn_tensor q;          /* in    [B,T,H,K]   bf16|f16|f32|f64  queries, of norm <= 1 unless qk_l2norm */
    linattn_tensor k;          /* in    [B,T,H,K]   =q                keys, of norm <= 1 unless qk_l2norm */
    linattn_tensor v;          /* in    [B,T,HV,V]  =q                values */
    linattn_tensor g;          /* in    [B,T,HV]    f32|bf16|f16|f64  log decay per token, <= 0, or raw gate input */
    linattn_tensor beta;       /* in    [B,T,HV]    f32|bf16|f16|f64  write strength, or its logits */
    linattn_tensor d_o;        /* in?   [B,T,HV,V]  =q                gradient of o, for LINATTN_BACKWARD */
    linattn_tensor cu_seqlens; /* in?   [N+1]       i32|i64           where each packed sequence starts, and the end; B is 1 */
    linattn_tensor A_log;      /* in?   [HV]        f32|bf16|f64      log of the gate's amplitude; for gate */
    linattn_tensor dt_bias;    /* in?   [HV]        f32|bf16|f64      added to the raw gate input; for gate */
    linattn_tensor M;          /* out   [N,HV,K,K]  f32|f64           transition */
    linattn_tensor h;          /* out   [N,HV,K,V]  f32|f64           what the span adds */
    linattn_tensor workspace;  /* out?  [W]         u8                scratch, linattn_gdn_segment_workspace() bytes */
    double scale;              /* in    scalar      f64               multiplies q, usually K^-0.5; not 0 */
    double lower_bound;        /* in    scalar      f64               for LINATTN_GATE_BOUNDED, < 0 */
    int32_t qk_l2norm;         /* in    scalar      i32               1: q and k are divided by sqrt(sum x^2 + 1e-6) first */
    int32_t gate;              /* in    scalar      i32               linattn_gate */
    int32_t beta_form;         /* in    scalar      i32               linattn_beta_form */
    int32_t direction;         /* in    scalar      i32               linattn_direction */
    int32_t checked;           /* in    scalar      i32               1: synchronise and test values too (lengths, indices, g <= 0) */
    int32_t reserved;          /* in    scalar      i32               0 */
    void *stream;              /* in    scalar      ptr               cudaStream_t, NULL is the default stream; ignored on the CPU */
} linattn_gdn_segment_args;

/* Kimi delta attention, the affine map of a span of tokens, S_out = M S_in + h; or backward, dS_in = M dS_out + h,
 * M transposed already. For context parallelism over devices. arXiv:2510.26692. */
typedef struct {
    uint64_t size;             /* sizeof(linattn_kda_segment_args) */
    linattn_tensor q;          /* in    [B,T,H,K]   bf16|f16|f32|f64  queries, of norm <= 1 unless qk_l2norm */
    linattn_tensor k;          /* in    [B,T,H,K]   =q                keys, of norm <= 1 unless qk_l2norm */
    linattn_tensor v;          /* in    [B,T,HV,V]  =q                values */
    linattn_tensor g;          /* in    [B,T,HV,K]  f32|bf16|f16|f64  log decay per token and key channel, <= 0, or raw gate input */
    linattn_tensor beta;       /* in    [B,T,HV]    f32|bf16|f16|f64  write strength, or its logits */
    linattn_tensor d_o;        /* in?   [B,T,HV,V]  =q                gradient of o, for LINATTN_BACKWARD */
    linattn_tensor cu_seqlens; /* in?   [N+1]       i32|i64           where each packed sequence starts, and the end; B is 1 */
    linattn_tensor A_log;      /* in?   [HV]        f32|bf16|f64      log of the gate's amplitude; for gate */
    linattn_tensor dt_bias;    /* in?   [HV,K]      f32|bf16|f64      added to the raw gate input; for gate */
    linattn_tensor M;          /* out   [N,HV,K,K]  f32|f64           transition */
    linattn_tensor h;          /* out   [N,HV,K,V]  f32|f64           what the span adds */
    linattn_tensor workspace;  /* out?  [W]         u8                scratch, linattn_kda_segment_workspace() bytes */
    double scale;              /* in    scalar      f64               multiplies q, usually K^-0.5; not 0 */
    double lower_bound;        /* in    scalar      f64               for LINATTN_GATE_BOUNDED, < 0 */
    int32_t qk_l2norm;         /* in    scalar      i32               1: q and k are divided by sqrt(sum x^2 + 1e-6) first */
    int32_t gate;              /* in    scalar      i32               linattn_gate */
    int32_t beta_form;         /* in    scalar      i32               linattn_beta_form */
    int32_t direction;         /* in    scalar      i32               linattn_direction */
    int32_t checked;           /* in    scalar      i32               1: synchronise and test values too (lengths, indices, g <= 0) */
    int32_t reserved;          /* in    scalar      i32               0 */
    void *stream;              /* in    scalar      ptr               cudaStream_t, NULL is the default stream; ignored on the CPU */
} linattn_kda_segment_args;

/* Compose the maps of R segments in order: states[r] is the state before segment r, final_state the one after the last.
 * With LINATTN_BACKWARD from the last segment to the first. */
typedef struct {
    uint64_t size;                /* sizeof(linattn_segment_merge_args) */
    linattn_tensor M;             /* in    [R,N,HV,K,K]  f32|f64       transitions */
    linattn_tensor h;             /* in    [R,N,HV,K,V]  =M            what each segment adds */
    linattn_tensor initial_state; /* in?   [N,HV,K,V]    f32|bf16|f64  state before the first segment, zeros if not given */
    linattn_tensor states;        /* out   [R,N,HV,K,V]  =M            state each segment starts from */
    linattn_tensor final_state;   /* out?  [N,HV,K,V]    f32|bf16|f64  state after the last segment */
    linattn_tensor workspace;     /* out?  [W]           u8            scratch, linattn_segment_merge_workspace() bytes */
    int32_t direction;            /* in    scalar        i32           linattn_direction */
    int32_t checked;              /* in    scalar        i32           1: synchronise and test values too (lengths, indices, g <= 0) */
    void *stream;                 /* in    scalar        ptr           cudaStream_t, NULL is the default stream; ignored on the CPU */
} linattn_segment_merge_args;

/* The ops, and for each the bytes of workspace that the same arguments need. The query runs every check that does not read
 * values, so it also answers whether the call would be taken; it ignores the workspace given. */
LINATTN_API linattn_status linattn_gdn_fwd(const linattn_gdn_fwd_args *args);
LINATTN_API linattn_status linattn_gdn_fwd_workspace(const linattn_gdn_fwd_args *args, uint64_t *bytes);
LINATTN_API linattn_status linattn_kda_fwd(const linattn_kda_fwd_args *args);
LINATTN_API linattn_status linattn_kda_fwd_workspace(const linattn_kda_fwd_args *args, uint64_t *bytes);
LINATTN_API linattn_status linattn_gdn_decode(const linattn_gdn_decode_args *args);
LINATTN_API linattn_status linattn_gdn_decode_workspace(const linattn_gdn_decode_args *args, uint64_t *bytes);
LINATTN_API linattn_status linattn_kda_decode(const linattn_kda_decode_args *args);
LINATTN_API linattn_status linattn_kda_decode_workspace(const linattn_kda_decode_args *args, uint64_t *bytes);
LINATTN_API linattn_status linattn_gdn_verify(const linattn_gdn_verify_args *args);
LINATTN_API linattn_status linattn_gdn_verify_workspace(const linattn_gdn_verify_args *args, uint64_t *bytes);
LINATTN_API linattn_status linattn_kda_verify(const linattn_kda_verify_args *args);
LINATTN_API linattn_status linattn_kda_verify_workspace(const linattn_kda_verify_args *args, uint64_t *bytes);
LINATTN_API linattn_status linattn_delta_commit(const linattn_delta_commit_args *args);
LINATTN_API linattn_status linattn_delta_commit_workspace(const linattn_delta_commit_args *args, uint64_t *bytes);
LINATTN_API linattn_status linattn_gdn_bwd(const linattn_gdn_bwd_args *args);
LINATTN_API linattn_status linattn_gdn_bwd_workspace(const linattn_gdn_bwd_args *args, uint64_t *bytes);
LINATTN_API linattn_status linattn_kda_bwd(const linattn_kda_bwd_args *args);
LINATTN_API linattn_status linattn_kda_bwd_workspace(const linattn_kda_bwd_args *args, uint64_t *bytes);
LINATTN_API linattn_status linattn_gdn_segment(const linattn_gdn_segment_args *args);
LINATTN_API linattn_status linattn_gdn_segment_workspace(const linattn_gdn_segment_args *args, uint64_t *bytes);
LINATTN_API linattn_status linattn_kda_segment(const linattn_kda_segment_args *args);
LINATTN_API linattn_status linattn_kda_segment_workspace(const linattn_kda_segment_args *args, uint64_t *bytes);
LINATTN_API linattn_status linattn_segment_merge(const linattn_segment_merge_args *args);
LINATTN_API linattn_status linattn_segment_merge_workspace(const linattn_segment_merge_args *args, uint64_t *bytes);

/* The bytes of `saved` that the forward with these arguments needs, from shapes alone; it ignores the `saved` given. 0 with
 * LINATTN_SAVE_NOTHING. The workspace depends on `save` too. */
LINATTN_API linattn_status linattn_gdn_fwd_saved(const linattn_gdn_fwd_args *args, uint64_t *bytes);
LINATTN_API linattn_status linattn_kda_fwd_saved(const linattn_kda_fwd_args *args, uint64_t *bytes);

/* Is there a kernel for this op ("gdn_fwd") on this device, for q of this dtype and heads of K and V? LINATTN_OK, or
 * LINATTN_ERR_UNSUPPORTED with the reason in linattn_last_error(). */
LINATTN_API linattn_status linattn_supports(const char *op, int32_t device_type, int32_t device_id, int32_t dtype, int64_t K,
                                            int64_t V);

LINATTN_API const char *linattn_last_error(void); /* sentence of this thread's last failed call; "" after a good one */
LINATTN_API const char *linattn_last_path(void);  /* what ran this thread's last op, such as "cpu/avx512"; "" before any */
LINATTN_API int32_t linattn_abi_version(void);    /* LINATTN_ABI_VERSION of the library */
LINATTN_API const char *linattn_version(void);    /* "0.1.0" */
LINATTN_API const char *linattn_build_info(void); /* compilers, and whether CUDA is in */

typedef struct {
    char name[128];
    int64_t memory_bytes;
    int32_t compute_capability; /* 90 for Hopper */
    int32_t multiprocessors;
    int32_t driver_version;     /* CUDA version that the driver supports: 13000 for 13.0 */
    int32_t runtime_version;    /* CUDA version that the library was built with */
    int32_t usable;             /* 1: this library has kernels for it, and a trivial one ran */
    int32_t reserved;
} linattn_device_info;

/* Number of CUDA devices; LINATTN_ERR_RUNTIME with the reason where there is no usable driver (count is then 0). */
LINATTN_API linattn_status linattn_device_count(int32_t *count);
LINATTN_API linattn_status linattn_device_query(int32_t device_id, linattn_device_info *info);

/* For array libraries in Python that offer DLPack's C exchange API (1.2 and newer), so that arguments need not be read one
 * attribute at a time. */
typedef struct {
    const void *api;      /* the library's DLPackExchangeAPI, of major version 1 */
    const void *types[2]; /* the Python types whose objects it takes; others are not touched */
    const void *none;     /* Python's None: a tensor that is not given */
    uint64_t type_at;     /* bytes from an object to the pointer to its type */
} linattn_exchange;
enum {
    LINATTN_VIEW_SAME = 0, /* the tensor as it is                                                                   */
    LINATTN_VIEW_SWAP = 1, /* [a,b,c,d] as [a,b,d,c]                                                                */
    LINATTN_VIEW_FLAT = 2, /* all elements as one axis; only where they are contiguous                              */
    LINATTN_VIEW_ROWS = 3  /* as rows of the last size of the first tensor, which has 4 axes; only where contiguous */
};

/* Fill the first `count` tensors and the stream of an argument struct, which begins with its size and is zero in these fields,
 * from that many Python objects, which keep their ownership: with the GIL held. `views` has a LINATTN_VIEW_* for each, or is
 * NULL. Gives a hash of the layouts, of the last four bits of the addresses and of the scalars behind the tensors; 0 where an
 * object has to be looked at more closely, perhaps with a Python exception set. */
LINATTN_API uint64_t linattn_exchange_borrow(const linattn_exchange *from, void *const *objects, int32_t count,
                                             const char *views, char *args);

/* Describe a DLPack tensor (its data is borrowed). LINATTN_ERR_TYPE for a dtype or device this library does not know. */
LINATTN_API linattn_status linattn_tensor_from_dlpack(const struct DLTensor *from, linattn_tensor *to);
/* [cdef.end] */

#ifdef __cplusplus
}
#endif
#endif
