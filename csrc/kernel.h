/* The C face of the CPU kernel: one struct in, a status out.
 *
 * The caller has checked every shape, stride and bound (src/headwise/backends/native_call.py, whose CALL mirrors this
 * struct field by field). B batch, H query heads, K key/value heads, T query rows, S key slots.
 */
#ifndef HEADWISE_KERNEL_H
#define HEADWISE_KERNEL_H

#include <stdint.h>

enum { HW_FLOAT32 = 0, HW_BFLOAT16 = 1, HW_FLOAT16 = 2 };
enum { HW_OK = 0, HW_NO_MEMORY = 1, HW_NO_SUCH_ISA = 2 };

/* Strides count elements; the last dimension of query, key, value and out has stride 1. */
typedef struct {
    const void *query, *key, *value;
    void *out;
    void *rest;                                   /* what rounding took from out, laid out like it; NULL for none */
    float *lse;                                   /* B H T, contiguous; NULL where it is not wanted */
    int64_t batch, heads, kv_heads, rows, slots, head_dim, v_head_dim;
    int64_t query_stride[3], key_stride[3], value_stride[3], out_stride[3];
    /* row t of batch row b sees max(first, t + left) <= s < min(last, t + right): these four numbers, and where there
       is a pointer also its number for each b */
    int64_t bounds[4];
    const int32_t *first, *last, *left, *right;
    /* or start and stop of each of run_count runs, contiguous; strides of B, H and T; NULL for none */
    const int32_t *runs;
    int64_t runs_stride[3], run_count;
    const uint8_t *mask;                          /* what is 0 is hidden as well; NULL for none */
    int64_t mask_stride[4];
    const float *bias;                            /* added to scores; NULL for none */
    int64_t bias_stride[4];
    const float *slopes;                          /* H: score - slope * |distance|; NULL for none */
    const float *table;                           /* H by table_size: bias by distance from -table_size / 2 on */
    int64_t table_size;
    int64_t distance;                             /* position of slot 0 less that of row 0 */
    const float *sinks;                           /* H; NULL for none */
    uint64_t seed, threshold;                     /* a weight whose word is below the threshold is dropped */
    int64_t first_query, first_key, first_head;   /* index of row 0, of slot 0, number of head 0: what the word depends on */
    float keep;                                   /* what the other weights are multiplied by; 0 for no dropout */
    float scale;
    float softcap;                                /* comes first; 0 for none */
    int32_t dtype;
    int32_t threads;
    int32_t bias_hides;                           /* whether it holds -inf; found by the kernel */
} hw_call;

/* What the backward of a call reads beside it, and writes: gradients in the dtype of the call, laid out as their
   projections read them, NULL where one is not wanted. The call has the output and the log-sum-exp of the forward. */
typedef struct {
    const void *out_grad;                         /* B H T V; its last dimension has stride 1 */
    int64_t out_grad_stride[3];
    const float *lse_grad;                        /* B H T, contiguous; NULL for 0 */
    void *query, *key, *value;                    /* B T H D, B S K D, B S K V */
    float *bias;                                  /* B H T S, contiguous and filled with 0; or H T S, summed over B, */
    int64_t bias_stride;                          /* where the stride of B is 0 */
    float *slopes, *table, *sinks;                /* B H, B H table_size, B H: for each sequence of its own */
} hw_gradients;

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define HW_PUBLIC __declspec(dllexport)
#else
#define HW_PUBLIC __attribute__((visibility("default")))
#endif

/* Instruction sets of this build that this processor has, best first, as text: "avx2 portable". */
HW_PUBLIC const char *hw_instructions(void);
/* Attention, forward; isa is one of those words, "" for the best. */
HW_PUBLIC int hw_forward(const hw_call *call, const char *isa);
/* Its backward. */
HW_PUBLIC int hw_backward(const hw_call *call, const hw_gradients *gradients, const char *isa);
/* The sizes of the two structs together, for the caller to compare with its own. */
HW_PUBLIC int64_t hw_size(void);
/* 1 where the build has OpenMP. */
HW_PUBLIC int hw_threaded(void);

#ifdef __cplusplus
}
#endif
#endif
