// Attention, forward: once for each instruction set. The file that includes this one says which by three macros: ISA,
// a namespace; LANES, floats of a vector; ROWS, rows of the tile of results that is kept in registers. Vectors are those
// of the compiler (GCC and Clang), so that one source serves all. PAIRS, where it is 1, says that bfloat16 is multiplied
// as it is, two numbers of a 32-bit lane at a time; without such an instruction the same is computed in float32.
//
// Scores go through a tile of keys at a time, and the softmax is corrected as larger ones are met (Milakov and
// Gimelshein, 2018, https://arxiv.org/abs/1805.02867; Dao et al., FlashAttention, 2022, https://arxiv.org/abs/2205.14135).
// Exponentials are of base 2: scores enter times log2 e.

#include <cstdlib>
#include <cstring>
#include <limits>

#if defined(__F16C__) || defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "convert.hpp"
#include "kernel.h"

namespace hw {
namespace ISA {

#define INLINED __attribute__((always_inline)) inline  // what a caller keeps in registers stays there

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t bits __attribute__((vector_size(LANES * 4)));  // whose sums may wrap around

constexpr int WIDE = 2 * LANES;     // columns of a register tile
constexpr int BLOCK = 384;          // query rows of a task, which share the packed keys and values
constexpr int TILE = 128;           // keys packed at once
constexpr int SPLIT = 512;          // keys of a task where queries are few: fixed, so that threads do not change the sums
constexpr int FEW = 16;             // up to so many query rows of all heads of a group are few, if keys are not
constexpr int MOST = 256;           // largest head size
constexpr int64_t SMALL = 1 << 17;
constexpr int64_t SOON = 4096;      // bytes from what few queries read to what they ask for
constexpr float LOG2E = 1.44269504088896341f, LN2 = 0.693147180559945309f;
constexpr float NONE = -std::numeric_limits<float>::infinity();

inline vec load(const float *p) { vec x; std::memcpy(&x, p, sizeof x); return x; }
inline void store(float *p, vec x) { std::memcpy(p, &x, sizeof x); }
inline vec all(float x) { return x - vec{}; }  // x - 0 is x and costs nothing; x + 0 is not, for -0
inline int64_t padded(int64_t n) { return (n + WIDE - 1) / WIDE * WIDE; }
inline int64_t vectors(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
inline int64_t within(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }
template <int HALF>
inline vec turned(vec x) {  // lanes exchanged with those HALF further
    ints at;
    for (int i = 0; i < LANES; ++i) at[i] = i ^ HALF;
    return __builtin_shuffle(x, at);
}
template <int HALF = LANES / 2>
inline float largest(vec x) {
    const vec y = turned<HALF>(x);
    x = x > y ? x : y;
    if constexpr (HALF > 1) return largest<HALF / 2>(x);
    return x[0];
}
template <int HALF = LANES / 2>
inline float total(vec x) {
    x += turned<HALF>(x);
    if constexpr (HALF > 1) return total<HALF / 2>(x);
    return x[0];
}

// 2^x for x <= 0, -inf included; below 2^-126 it is 0, and NaN stays NaN.
inline vec exp2(vec x) {
    x = all(-127.0f) > x ? all(-127.0f) : x;
    const vec shifted = x + 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
    const vec f = x - (shifted - 12582912.0f);
    vec p = all(1.326472731307149e-03f);
    p = p * f + 9.671512991189957e-03f;
    p = p * f + 5.550733581185341e-02f;
    p = p * f + 2.402224242687225e-01f;
    p = p * f + 6.931470036506653e-01f;
    p = p * f + 1.0f;
    return (vec)(((bits)shifted << 23) + (bits)p);
}

inline float exp2(float x) { return exp2(all(x))[0]; }

// ---- products of matrices

// sum + x * y; with DUAL every lane holds two bfloat16, whose two products are added.
template <bool DUAL>
inline vec multiply(vec sum, const float *x, vec y) {
    if constexpr (!DUAL) return sum + all(*x) * y;
    uint32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    const bits two = bits{} + pair;
#if PAIRS && defined(__AVX512BF16__)
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)two, (__m512bh)y);
#else
    const bits high = bits{} + 0xffff0000u, other = (bits)y;
    return sum + (vec)(two << 16) * (vec)(other << 16) + (vec)(two & high) * (vec)(other & high);
#endif
}

// c[R][V * LANES] = a[R][n] b[n][V * LANES], added to what is there if ADD; a step of b is WIDE numbers, whatever V is.
template <int R, int V, bool ADD, bool DUAL>
inline void tile(int64_t n, const float *a, int64_t a_stride, const float *b, float *c, int64_t c_stride) {
    vec sum[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) sum[r][v] = ADD ? load(c + r * c_stride + v * LANES) : vec{};
#pragma GCC unroll 4
    for (int64_t i = 0; i < n; ++i) {
        vec y[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) y[v] = load(b + i * WIDE + v * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v) sum[r][v] = multiply<DUAL>(sum[r][v], a + r * a_stride + i, y[v]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) store(c + r * c_stride + v * LANES, sum[r][v]);
}

template <bool ADD, bool DUAL, int V = 2, int R = ROWS>
inline void tile_of(int64_t rows, int64_t n, const float *a, int64_t a_stride, const float *b, float *c, int64_t c_stride) {
    if (rows == R) return tile<R, V, ADD, DUAL>(n, a, a_stride, b, c, c_stride);
    if constexpr (R > 1) tile_of<ADD, DUAL, V, R - 1>(rows, n, a, a_stride, b, c, c_stride);
}

// Products of rows of a, n long, with columns from ... to of panels of b, for which from is a multiple of WIDE.
template <bool DUAL>
inline void products(int64_t rows, int64_t n, const float *a, int64_t a_stride, const float *b, int64_t from, int64_t to, float *c, int64_t c_stride) {
    int64_t j = from;
    for (; j + LANES < to; j += WIDE) tile_of<false, DUAL>(rows, n, a, a_stride, b + j * n, c + j, c_stride);
    if (j < to) tile_of<false, DUAL, 1>(rows, n, a, a_stride, b + j * n, c + j, c_stride);
}

// ---- reading and writing

constexpr int AHEAD = 8;  // rows: memory is slower than the sums, and rows may lie far apart

// Asks for n numbers that will soon be read, or written.
template <int WRITTEN = 0>
inline void fetch(const void *from, int64_t at, int64_t n, int32_t dtype) {
    const int64_t size = dtype == HW_FLOAT32 ? 4 : 2;
    const uintptr_t first = (uintptr_t)from + at * size;  // which may lie beyond the last row, where nothing is read
    for (int64_t i = 0; i < n * size; i += 64) __builtin_prefetch((const void *)(first + i), WRITTEN);
}

inline float number(const void *from, int64_t at, int32_t dtype) {
    if (dtype == HW_FLOAT32) return ((const float *)from)[at];
    const uint16_t x = ((const uint16_t *)from)[at];
    return dtype == HW_BFLOAT16 ? from_bfloat16(x) : from_float16(x);
}

void read_row(float *to, const void *from, int64_t at, int64_t n, int32_t dtype, float by = 1) {
    if (dtype == HW_FLOAT32) {
        const float *p = (const float *)from + at;
        for (int64_t i = 0; i < n; ++i) to[i] = p[i] * by;
    } else if (dtype == HW_BFLOAT16) {
        const uint16_t *p = (const uint16_t *)from + at;
        for (int64_t i = 0; i < n; ++i) to[i] = from_bfloat16(p[i]) * by;
    } else {
        const uint16_t *p = (const uint16_t *)from + at;
        int64_t i = 0;
#if defined(__F16C__)
        for (; i + 8 <= n; i += 8)
            _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + i))) * by);
#endif
        for (; i < n; ++i) to[i] = from_float16(p[i]) * by;
    }
}

// n bfloat16 as they are, by pairs; the last is filled up with 0.
inline void copy_pairs(float *to, const void *from, int64_t at, int64_t n) {
    if (n % 2) std::memset(to + n / 2, 0, sizeof(float));
    std::memcpy(to, (const uint16_t *)from + at, n * sizeof(uint16_t));
}

void write_row(void *to, int64_t at, const float *from, int64_t n, int32_t dtype, float by) {
    // what saw nothing is 0, whatever was summed: 0 times NaN would be NaN
    if (dtype == HW_FLOAT32)
        for (int64_t i = 0; i < n; ++i) ((float *)to)[at + i] = by == 0 ? 0 : from[i] * by;
    else if (dtype == HW_BFLOAT16)
        for (int64_t i = 0; i < n; ++i) ((uint16_t *)to)[at + i] = to_bfloat16(by == 0 ? 0 : from[i] * by);
    else
        for (int64_t i = 0; i < n; ++i) ((uint16_t *)to)[at + i] = to_float16(by == 0 ? 0 : from[i] * by);
}

// Pairs of bfloat16 are 32 bits, whose halves are two float32 after a shift and a mask: the even numbers of WIDE come first
// in a line, then the odd ones. What meets a line is in this order as well.
inline void apart(float *x, int64_t wide) {
    for (; wide > 0; wide -= WIDE, x += WIDE) {
        float odd[LANES];
        for (int i = 0; i < LANES; ++i) odd[i] = x[2 * i + 1];
        for (int i = 0; i < LANES; ++i) x[i] = x[2 * i];
        std::memcpy(x + LANES, odd, sizeof odd);
    }
}
inline void together(float *x, int64_t wide) {
    for (; wide > 0; wide -= WIDE, x += WIDE) {
        float all[WIDE];
        for (int i = 0; i < LANES; ++i) all[2 * i] = x[i], all[2 * i + 1] = x[i + LANES];
        std::memcpy(x, all, sizeof all);
    }
}

inline int64_t query_at(const hw_call *x, int64_t b, int64_t h, int64_t t) {
    return b * x->query_stride[0] + h * x->query_stride[1] + t * x->query_stride[2];
}
inline int64_t key_at(const hw_call *x, int64_t b, int64_t kv, int64_t s) {
    return b * x->key_stride[0] + kv * x->key_stride[1] + s * x->key_stride[2];
}
inline int64_t value_at(const hw_call *x, int64_t b, int64_t kv, int64_t s) {
    return b * x->value_stride[0] + kv * x->value_stride[1] + s * x->value_stride[2];
}
inline int64_t out_at(const hw_call *x, int64_t b, int64_t h, int64_t t) {
    return b * x->out_stride[0] + h * x->out_stride[1] + t * x->out_stride[2];
}

// ---- what a row sees

struct range { int32_t start, stop; };

inline const int32_t *runs_of(const hw_call *x, int64_t b, int64_t h, int64_t t) {
    return x->runs + b * x->runs_stride[0] + h * x->runs_stride[1] + t * x->runs_stride[2];
}

// From the first slot that a row may see to the one after the last; start == stop where it sees none.
range reach(const hw_call *x, int64_t b, int64_t h, int64_t t) {
    int64_t start = 0, stop = x->slots;
    if (x->runs) {
        start = x->slots, stop = 0;
        const int32_t *run = runs_of(x, b, h, t);
        for (int64_t i = 0; i < x->run_count; ++i)
            if (run[2 * i] < run[2 * i + 1]) {
                start = run[2 * i] < start ? run[2 * i] : start;
                stop = run[2 * i + 1] > stop ? run[2 * i + 1] : stop;
            }
    } else {
        const int64_t *bound = x->bounds;
        if (bound[0] > start) start = bound[0];
        if (bound[1] < stop) stop = bound[1];
        if (t + bound[2] > start) start = t + bound[2];
        if (t + bound[3] < stop) stop = t + bound[3];
        if (x->first && x->first[b] > start) start = x->first[b];
        if (x->left && t + x->left[b] > start) start = t + x->left[b];
        if (x->last && x->last[b] < stop) stop = x->last[b];
        if (x->right && t + x->right[b] < stop) stop = t + x->right[b];
    }
    start = within(start, 0, x->slots), stop = within(stop, 0, x->slots);
    if (stop <= start) start = stop = 0;
    return {(int32_t)start, (int32_t)stop};
}

// Whether nothing but its range says what a row sees.
inline bool plain(const hw_call *x) { return !x->mask && !x->bias_hides && (!x->runs || x->run_count == 1); }

// The call, and whether its bias hides anything: looked for once, where most hold no -inf.
hw_call looked_at(const hw_call *x) {
    hw_call found = *x;
    found.bias_hides = 0;
    if (!x->bias) return found;
    const int64_t sizes[4] = {x->batch, x->heads, x->rows, x->slots}, *step = x->bias_stride;
    int64_t n[4];
    for (int i = 0; i < 4; ++i) n[i] = step[i] ? sizes[i] : 1;
    int hides = 0;
#pragma omp parallel for num_threads(x->threads) reduction(| : hides) if (x->threads > 1 && n[0] * n[1] * n[2] * n[3] >= SMALL)
    for (int64_t i = 0; i < n[0] * n[1] * n[2]; ++i) {
        const float *p = x->bias + i / n[2] / n[1] * step[0] + i / n[2] % n[1] * step[1] + i % n[2] * step[2];
        int any = 0;
        if (step[3] == 1)
            for (int64_t c = 0; c < n[3]; ++c) any |= p[c] == NONE;
        else
            for (int64_t c = 0; c < n[3]; ++c) any |= p[c * step[3]] == NONE;
        hides |= any;
    }
    found.bias_hides = hides;
    return found;
}

// Sets the scores of slots at ... at + n that a row may not see to -inf, and marks the others in seen.
void hide(const hw_call *x, int64_t b, int64_t h, int64_t t, range whole, int64_t at, int64_t n, float *s, uint8_t *seen) {
    const int64_t first = within(whole.start - at, 0, n), last = within(whole.stop - at, first, n);
    if (plain(x)) {
        for (int64_t c = 0; c < first; ++c) s[c] = NONE;
        for (int64_t c = last; c < n; ++c) s[c] = NONE;
        std::memset(seen + first, 1, last - first);
        return;
    }
    uint8_t open[SPLIT] = {0};
    if (x->runs) {
        const int32_t *run = runs_of(x, b, h, t);
        for (int64_t i = 0; i < x->run_count; ++i) {
            const int64_t from = within(run[2 * i] - at, 0, n), to = within(run[2 * i + 1] - at, 0, n);
            if (to > from) std::memset(open + from, 1, to - from);
        }
    } else std::memset(open + first, 1, last - first);
    if (x->mask) {
        const uint8_t *p = x->mask + b * x->mask_stride[0] + h * x->mask_stride[1] + t * x->mask_stride[2] + at * x->mask_stride[3];
        if (x->mask_stride[3] == 1)  // by itself, for vectors
            for (int64_t c = 0; c < n; ++c) open[c] &= p[c] != 0;
        else
            for (int64_t c = 0; c < n; ++c) open[c] &= p[c * x->mask_stride[3]] != 0;
    }
    if (x->bias_hides) {
        const float *p = x->bias + b * x->bias_stride[0] + h * x->bias_stride[1] + t * x->bias_stride[2] + at * x->bias_stride[3];
        if (x->bias_stride[3] == 1)
            for (int64_t c = 0; c < n; ++c) open[c] &= p[c] != NONE;
        else
            for (int64_t c = 0; c < n; ++c) open[c] &= p[c * x->bias_stride[3]] != NONE;
    }
    for (int64_t c = 0; c < n; ++c) {
        s[c] = open[c] ? s[c] : NONE;
        seen[c] |= open[c];
    }
}

inline bool modifies(const hw_call *x) { return x->softcap > 0 || x->slopes || x->table || x->bias; }

// tanh, for y within 9: a quotient of two polynomials that is fitted to it, within 7e-9 of its value. Unlike a formula of exp
// it is as good where the value is small.
inline vec tanh(vec y) {
    const vec u = y * y;
    vec p = all(-8.48815677e-14f), q = all(2.54614348e-04f);
    p = p * u + 5.27778252e-11f;
    p = p * u - 2.02250012e-08f;
    p = p * u + 1.11542829e-05f;
    p = p * u + 3.10395597e-03f;
    p = p * u + 1.30840107e-01f;
    p = p * u + 1.0f;
    q = q * u + 2.44951798e-02f;
    q = q * u + 4.64173378e-01f;
    q = q * u + 1.0f;
    return y * p / q;
}

// The cap of n scaled scores, and its derivative where there is room for it. Reads and writes up to a whole vector.
void softcap(const hw_call *x, int64_t n, float *s, float *derivative = nullptr) {
    const vec most = all(9 * x->softcap), least = -most;  // beyond which tanh is 1 in float32
    for (int64_t c = 0; c < n; c += LANES) {
        vec y = load(s + c);
        y = most < y ? most : y, y = least > y ? least : y;  // NaN stays
        const vec share = tanh(y * (1 / x->softcap));
        store(s + c, share * x->softcap);
        if (derivative) store(derivative + c, 1.0f - share * share);
    }
}

// Of n slots, the first at a distance, those that have an entry of their own: those before share the first entry, those
// after it the last.
inline range in_table(const hw_call *x, int64_t away, int64_t n) {
    const int64_t first = -(away + x->table_size / 2), start = within(first, 0, n);
    return {(int32_t)start, (int32_t)within(first + x->table_size, start, n)};
}

// What is added to the scores of a row after the cap.
void shift(const hw_call *x, int64_t b, int64_t h, int64_t t, int64_t at, int64_t n, float *s) {
    const int64_t away = at + x->distance - t;
    if (x->slopes) {
        const float slope = x->slopes[h], first = (float)away;  // in float32, for vectors
        for (int32_t c = 0; c < (int32_t)n; ++c) s[c] -= slope * __builtin_fabsf(first + (float)c);
    }
    if (x->table) {
        const float *table = x->table + h * x->table_size, *here = table + away + x->table_size / 2;
        const range part = in_table(x, away, n);
        for (int64_t c = 0; c < part.start; ++c) s[c] += table[0];
        for (int64_t c = part.start; c < part.stop; ++c) s[c] += here[c];
        for (int64_t c = part.stop; c < n; ++c) s[c] += table[x->table_size - 1];
    }
    if (x->bias) {
        const float *p = x->bias + b * x->bias_stride[0] + h * x->bias_stride[1] + t * x->bias_stride[2] + at * x->bias_stride[3];
        if (x->bias_stride[3] == 1)
            for (int64_t c = 0; c < n; ++c) s[c] += p[c];
        else
            for (int64_t c = 0; c < n; ++c) s[c] += p[c * x->bias_stride[3]];
    }
}

// What is done to the scores of a row, which are still to be multiplied by scale. log2 e comes with the exponential.
void modify(const hw_call *x, int64_t b, int64_t h, int64_t t, int64_t at, int64_t n, float *s, float scale) {
    if (scale != 1)
        for (int64_t c = 0; c < n; ++c) s[c] *= scale;
    if (x->softcap > 0) softcap(x, n, s);
    shift(x, b, h, t, at, n, s);
}

// ---- dropout

// What dropout multiplies the weights of a row by, by Philox4x32-10 (src/headwise/philox.py says by which counter): the
// same whatever is computed together. The loops over groups of four keys are for the compiler's vectors.
void drop(const hw_call *x, int64_t b, int64_t h, int64_t t, int64_t at, int64_t n, float *by) {
    constexpr int MANY = SPLIT / 4 + 8;
    const int64_t first = x->first_key + at, base = first >> 2, groups = ((first + n - 1) >> 2) - base + 1;
    uint32_t c0[MANY], c1[MANY], c2[MANY], c3[MANY];
    const uint32_t query = (uint32_t)(x->first_query + t), head = (uint32_t)(x->first_head + h), row = (uint32_t)b;
    for (int64_t i = 0; i < groups; ++i) c0[i] = (uint32_t)(base + i), c1[i] = query, c2[i] = head, c3[i] = row;
    uint32_t k0 = (uint32_t)x->seed, k1 = (uint32_t)(x->seed >> 32);
    for (int round = 0; round < 10; ++round) {
        for (int64_t i = 0; i < groups; ++i) {
            const uint64_t even = (uint64_t)c0[i] * 0xD2511F53u, odd = (uint64_t)c2[i] * 0xCD9E8D57u;
            c0[i] = (uint32_t)(odd >> 32) ^ c1[i] ^ k0, c1[i] = (uint32_t)odd;
            c2[i] = (uint32_t)(even >> 32) ^ c3[i] ^ k1, c3[i] = (uint32_t)even;
        }
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    const uint32_t last = (uint32_t)(x->threshold - 1);  // of the words that drop
    const float keep = x->keep;
    float all[4 * MANY];
    for (int64_t i = 0; i < groups; ++i) {
        all[4 * i] = c0[i] > last ? keep : 0, all[4 * i + 1] = c1[i] > last ? keep : 0;
        all[4 * i + 2] = c2[i] > last ? keep : 0, all[4 * i + 3] = c3[i] > last ? keep : 0;
    }
    std::memcpy(by, all + (first & 3), n * sizeof(float));
}

// ---- the softmax of a row, which goes on from tile to tile

struct state { float top, sum; };

// Turns n scores, times a positive scale, into weights relative to the largest met so far, and returns what to multiply
// earlier sums by.
float soften(state &row, float *s, int64_t n, float scale) {
    const int64_t whole = vectors(n), even = whole / WIDE * WIDE;
    for (int64_t c = n; c < whole; ++c) s[c] = NONE;
    vec top[2] = {all(NONE), all(NONE)};
    for (int64_t c = 0; c < even; c += WIDE) {
        const vec y0 = load(s + c), y1 = load(s + c + LANES);
        top[0] = y0 > top[0] ? y0 : top[0], top[1] = y1 > top[1] ? y1 : top[1];
    }
    if (even < whole) {
        const vec y = load(s + even);
        top[0] = y > top[0] ? y : top[0];
    }
    const float met = largest(top[0] > top[1] ? top[0] : top[1]) * scale, now = met > row.top ? met : row.top;
    const float base = now == NONE ? 0 : now;  // nothing seen yet: 2^(-inf - 0) = 0
    vec sum[2] = {{}, {}};
    for (int64_t c = 0; c < even; c += WIDE) {
        const vec p0 = exp2(load(s + c) * scale - base), p1 = exp2(load(s + c + LANES) * scale - base);
        sum[0] += p0, sum[1] += p1;
        store(s + c, p0), store(s + c + LANES, p1);
    }
    if (even < whole) {
        const vec p = exp2(load(s + even) * scale - base);
        sum[0] += p;
        store(s + even, p);
    }
    const float by = row.top == now || row.top == NONE ? 1 : exp2(row.top - base);  // nothing to multiply before the first
    row.sum = row.sum * by + total(sum[0] + sum[1]);
    row.top = now;
    return by;
}

// Writes a row: divided by its sum, the sink taken into account.
void finish(const hw_call *x, int64_t b, int64_t h, int64_t t, state row, const float *o) {
    float top = row.top * LN2, sum = row.sum, by = 1;
    if (x->sinks && x->sinks[h] != NONE) {  // one more logit in the sum
        const float sink = x->sinks[h], high = sink > top ? sink : top;
        by = sum == 0 ? 0 : exp2((top - high) * LOG2E);
        sum = (sum == 0 ? 0 : sum * by) + exp2((sink - high) * LOG2E);
        top = high;
    }
    const float part = sum == 0 ? 0 : by / sum;
    const int64_t at = out_at(x, b, h, t), v = x->v_head_dim;
    write_row(x->out, at, o, v, x->dtype, part);
    if (x->rest) {  // a backward that took the rounded output would add up its errors
        float rounded[MOST], rest[MOST];
        read_row(rounded, x->out, at, v, x->dtype);
        for (int64_t i = 0; i < v; ++i) rest[i] = part == 0 ? 0 : o[i] * part - rounded[i];
        write_row(x->rest, at, rest, v, x->dtype, 1);
    }
    if (x->lse) x->lse[(b * x->heads + h) * x->rows + t] = sum == 0 ? NONE : top + __builtin_logf(sum);
}

// ---- many queries: blocks of rows against tiles of keys

template <int HALF>
inline void transpose(vec *row) {  // LANES x LANES, by exchanging ever smaller off-diagonal blocks
    ints low, high;
    for (int i = 0; i < LANES; ++i) {
        low[i] = i & HALF ? LANES + i - HALF : i;
        high[i] = i & HALF ? LANES + i : i + HALF;
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i)
        if (!(i & HALF)) {
            const vec a = row[i], b = row[i + HALF];
            row[i] = __builtin_shuffle(a, b, low);
            row[i + HALF] = __builtin_shuffle(a, b, high);
        }
    if constexpr (HALF > 1) transpose<HALF / 2>(row);
}

// n rows of size numbers each, by panels of WIDE rows: to[panel][size][WIDE], or with DUAL half as many pairs of them.
template <bool DUAL>
void pack_rows(const void *from, int64_t first, int64_t stride, int64_t size, int32_t dtype, int64_t n, float *to) {
    float rows[LANES][MOST];
    const int64_t d = DUAL ? (size + 1) / 2 : size;
    for (int64_t j = 0; j < n; j += LANES) {
        float *panel = to + j / WIDE * d * WIDE + j % WIDE;
        const float *p[LANES];
        for (int64_t c = 0; c < LANES; ++c) {
            // beyond the last row any will do: what comes of it is not read
            const int64_t at = first + (j + c < n ? j + c : j) * stride;
            fetch(from, first + (j + c + LANES) * stride, size, dtype);
            p[c] = rows[c];
            if (DUAL) copy_pairs(rows[c], from, at, size);
            else if (dtype == HW_FLOAT32) p[c] = (const float *)from + at;
            else read_row(rows[c], from, at, d, dtype);
        }
        int64_t i = 0;
        for (; i + LANES <= d; i += LANES) {
            vec row[LANES];
#pragma GCC unroll 16
            for (int c = 0; c < LANES; ++c) row[c] = load(p[c] + i);
            transpose<LANES / 2>(row);
#pragma GCC unroll 16
            for (int c = 0; c < LANES; ++c) store(panel + (i + c) * WIDE, row[c]);
        }
        for (; i < d; ++i)
            for (int c = 0; c < LANES; ++c) std::memcpy(panel + i * WIDE + c, p[c] + i, sizeof(float));
    }
}

// Values likewise: to[panel][n][WIDE]. What nobody sees may hold NaN, and 0 times NaN is NaN: it is zero here.
void pack_values(const hw_call *x, int64_t b, int64_t kv, int64_t at, int64_t n, const uint8_t *seen, float *to) {
    float row[MOST + WIDE];
    const int64_t v = x->v_head_dim, wide = padded(v);
    for (int64_t c = 0; c < n; ++c) {
        const int64_t from = value_at(x, b, kv, at + c);
        const float *p = (const float *)x->value + from;
        const bool shown = !seen || seen[c];
        fetch(x->value, value_at(x, b, kv, at + c + AHEAD), v, x->dtype);
        if (!shown || x->dtype != HW_FLOAT32 || v != wide) {
            if (shown) read_row(row, x->value, from, v, x->dtype);
            for (int64_t i = shown ? v : 0; i < wide; ++i) row[i] = 0;
            p = row;
        }
        for (int64_t j = 0; j < wide; j += WIDE) {
            store(to + j * n + c * WIDE, load(p + j));
            store(to + j * n + c * WIDE + LANES, load(p + j + LANES));
        }
    }
}

// Values in bfloat16 by pairs of keys: to[panel][n / 2][WIDE], in a panel the even features before the odd ones.
void pack_value_pairs(const hw_call *x, int64_t b, int64_t kv, int64_t at, int64_t n, const uint8_t *seen, float *to) {
    uint16_t rows[2][MOST + WIDE];
    const int64_t v = x->v_head_dim, wide = padded(v), pairs = (n + 1) / 2;
    for (int64_t c = 0; c < pairs; ++c) {
        const uint16_t *p[2];
        for (int64_t i = 0; i < 2; ++i) {
            const bool shown = 2 * c + i < n && (!seen || seen[2 * c + i]);
            p[i] = (const uint16_t *)x->value + value_at(x, b, kv, at + (2 * c + i < n ? 2 * c + i : 0));
            if (shown && v == wide) continue;
            std::memset(rows[i], 0, wide * sizeof(uint16_t));
            if (shown) std::memcpy(rows[i], p[i], v * sizeof(uint16_t));
            p[i] = rows[i];
        }
        for (int64_t j = 0; j < wide; j += WIDE) {
            bits first, second;
            std::memcpy(&first, p[0] + j, sizeof first);
            std::memcpy(&second, p[1] + j, sizeof second);
            store(to + j * pairs + c * WIDE, (vec)((first & 0xffffu) | second << 16));
            store(to + j * pairs + c * WIDE + LANES, (vec)(first >> 16 | (second & 0xffff0000u)));
        }
    }
}

// The weights of a row as bfloat16, in the first half of where they were.
inline void narrow(float *s, int64_t n) {
#if PAIRS && defined(__AVX512BF16__)
    for (int64_t c = 0; c < n; c += WIDE) store(s + c / 2, (vec)_mm512_cvtne2ps_pbh((__m512)load(s + c + LANES), (__m512)load(s + c)));
#else
    for (int64_t c = 0; c < padded(n); c += 2) {
        const uint16_t pair[2] = {to_bfloat16(s[c]), to_bfloat16(s[c + 1])};
        std::memcpy(s + c / 2, pair, sizeof pair);
    }
#endif
}

struct scratch {
    float *query, *keys, *values, *scores, *out;
    state row[BLOCK];
    range sees[BLOCK];
};

int64_t scratch_floats(const hw_call *x) {
    return BLOCK * x->head_dim + TILE * x->head_dim + TILE * padded(x->v_head_dim) + BLOCK * TILE + BLOCK * padded(x->v_head_dim);
}

void lay_out(scratch &y, float *memory, const hw_call *x) {
    y.query = memory, y.keys = y.query + BLOCK * x->head_dim, y.values = y.keys + TILE * x->head_dim;
    y.scores = y.values + TILE * padded(x->v_head_dim), y.out = y.scores + BLOCK * TILE;
}

template <bool DUAL>
void block(const hw_call *x, int64_t b, int64_t h, int64_t first, int64_t rows, scratch &y) {
    const int64_t kv = h / (x->heads / x->kv_heads), d = DUAL ? (x->head_dim + 1) / 2 : x->head_dim, wide = padded(x->v_head_dim);
    const bool modified = modifies(x) || (DUAL && x->scale <= 0), simple = plain(x);
    // pairs are multiplied as they came, and the scale follows
    const float scale = modified ? x->scale : x->scale * LOG2E, later = DUAL ? scale : 1;
    int64_t low = x->slots, high = 0;
    const int64_t nearest = reach(x, b, h, first).start;
    for (int64_t r = 0; r < AHEAD; ++r) {  // before anything waits for one of them
        fetch(x->query, query_at(x, b, h, first + r), x->head_dim, x->dtype);
        fetch(x->key, key_at(x, b, kv, nearest + r), x->head_dim, x->dtype);
        fetch(x->value, value_at(x, b, kv, nearest + r), x->v_head_dim, x->dtype);
    }
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t from = query_at(x, b, h, first + r);
        fetch(x->query, query_at(x, b, h, first + r + AHEAD), x->head_dim, x->dtype);
        if (DUAL) copy_pairs(y.query + r * d, x->query, from, x->head_dim);
        else read_row(y.query + r * d, x->query, from, d, x->dtype, scale);
        y.row[r] = {NONE, 0};
        const range sees = y.sees[r] = reach(x, b, h, first + r);
        if (sees.stop > sees.start) low = sees.start < low ? sees.start : low, high = sees.stop > high ? sees.stop : high;
    }
    std::memset(y.out, 0, rows * wide * sizeof(float));
    uint8_t seen[TILE];
    for (int64_t at = low; at < high; at += TILE) {
        const int64_t n = high - at < TILE ? high - at : TILE;
        // columns of the tile that a group of ROWS rows reaches, and whether each of its rows sees all of these
        int32_t from[BLOCK / ROWS], to[BLOCK / ROWS];
        bool open[BLOCK / ROWS], any = false, every = true;
        for (int64_t g = 0; g * ROWS < rows; ++g) {
            int64_t start = n, stop = 0;
            for (int64_t r = g * ROWS; r < rows && r < (g + 1) * ROWS; ++r) {
                const int64_t begin = within(y.sees[r].start - at, 0, n), end = within(y.sees[r].stop - at, 0, n);
                if (end > begin) start = begin < start ? begin : start, stop = end > stop ? end : stop;
            }
            open[g] = simple;
            for (int64_t r = g * ROWS; r < rows && r < (g + 1) * ROWS; ++r)
                open[g] &= y.sees[r].start <= at + start && y.sees[r].stop >= at + stop;
            from[g] = (int32_t)(start / WIDE * WIDE), to[g] = (int32_t)stop;
            open[g] &= from[g] == start;
            any |= stop > start;
            every &= open[g] && start == 0 && stop == n;
        }
        if (!any) continue;
        pack_rows<DUAL>(x->key, key_at(x, b, kv, at), x->key_stride[2], x->head_dim, x->dtype, n, y.keys);
        if (!every) std::memset(seen, 0, n);
        for (int64_t g = 0; g * ROWS < rows; ++g) {
            if (to[g] <= from[g]) continue;
            const int64_t r0 = g * ROWS, count = rows - r0 < ROWS ? rows - r0 : ROWS;
            float *s = y.scores + r0 * TILE;
            products<DUAL>(count, d, y.query + r0 * d, d, y.keys, from[g], to[g], s, TILE);
            for (int64_t r = r0; r < r0 + count; ++r) {
                float *row = y.scores + r * TILE + from[g];
                const int64_t wanted = to[g] - from[g];
                if (modified) modify(x, b, h, first + r, at + from[g], wanted, row, later);
                if (!open[g]) hide(x, b, h, first + r, y.sees[r], at + from[g], wanted, row, seen + from[g]);
                const float by = soften(y.row[r], row, wanted, modified ? LOG2E : later);
                if (x->keep > 0) {  // after the softmax: its sum is of all weights
                    float by_keep[TILE];
                    drop(x, b, h, first + r, at + from[g], wanted, by_keep);
                    for (int64_t c = 0; c < wanted; ++c) row[c] *= by_keep[c];
                }
                if (DUAL) narrow(row, wanted);
                if (by != 1)
                    for (int64_t i = 0; i < wide; i += LANES) store(y.out + r * wide + i, load(y.out + r * wide + i) * by);
            }
            if (open[g] && !every) std::memset(seen + from[g], 1, to[g] - from[g]);
        }
        if (DUAL) pack_value_pairs(x, b, kv, at, n, every ? nullptr : seen, y.values);
        else pack_values(x, b, kv, at, n, every ? nullptr : seen, y.values);
        const int64_t deep = DUAL ? (n + 1) / 2 : n, each = DUAL ? 2 : 1;
        for (int64_t g = 0; g * ROWS < rows; ++g) {
            if (to[g] <= from[g]) continue;
            const int64_t r0 = g * ROWS, count = rows - r0 < ROWS ? rows - r0 : ROWS;
            for (int64_t j = 0; j < wide; j += WIDE)
                tile_of<true, DUAL>(count, (to[g] - from[g] + each - 1) / each, y.scores + r0 * TILE + from[g], TILE,
                                    y.values + j * deep + from[g] / each * WIDE, y.out + r0 * wide + j, wide);
        }
    }
    for (int64_t r = 0; r < rows; ++r) {
        fetch<1>(x->out, out_at(x, b, h, first + r + AHEAD), x->v_head_dim, x->dtype);
        if (DUAL) together(y.out + r * wide, wide);
        finish(x, b, h, first + r, y.row[r], y.out + r * wide);
    }
}

// ---- few queries: keys and values are read where they lie, by all heads of a group at once

// Rows that will be read are asked for line by line, in the order in which they lie, while others are summed: memory is
// slower than the sums, and asked for all at once it would hold them up. One query sums too little for that to matter.
struct coming {
    uintptr_t at;  // beyond the last row too, where there is nothing to point at
    int64_t left, lines, jump, rows;
    coming(const void *from, int64_t first, int64_t step, int64_t n, int32_t dtype) {
        const int64_t size = dtype == HW_FLOAT32 ? 4 : 2;
        at = (uintptr_t)from + first * size;
        lines = left = (n * size + 63) / 64, jump = step * size - lines * 64, rows = n ? LANES : 0;
    }
    void ask() {
        if (!rows) return;
        __builtin_prefetch((const void *)at);
        at += 64;
        if (--left == 0) left = lines, at += jump, --rows;
    }
    void ask_all() {
        for (; rows; --rows, at += jump + 64 * lines)
            for (int64_t i = 0; i < lines; ++i) __builtin_prefetch((const void *)(at + 64 * i));
    }
    // as much as is read, when the number-th so many bytes of LANES rows are
    template <int BYTES>
    void ask(uint64_t number) {
        if constexpr (BYTES < 64) number % (64 / BYTES) ? (void)0 : ask();
        else for (int i = 0; i < BYTES; i += 64) ask();
    }
};

// LANES rows of keys or values, n long and zero up to wide: where they lie, or float32 in lines. From count on there are
// none, and those that are not seen (if it says so) are zero, for 0 times NaN is NaN.
inline void lines_of(const void **p, float *lines, const void *from, int64_t at, int64_t step, int64_t count, const uint8_t *seen,
                     int64_t n, int64_t wide, int32_t dtype) {
    static const float nothing[MOST] = {0};
    const int64_t size = dtype == HW_FLOAT32 ? 4 : 2;
    const char *first = (const char *)from + at * size;
    for (int c = 0; c < LANES; ++c) p[c] = first + c * step * size;
    const bool there = n == wide && dtype != HW_FLOAT16;
    if (there && count >= LANES && !seen) return;
    for (int c = 0; c < LANES; ++c) {
        float *line = lines + c * MOST;
        if (c >= count || (seen && !seen[c])) p[c] = nothing;
        else if (!there) {
            read_row(line, from, at + c * step, n, dtype);
            for (int64_t i = n; i < wide; ++i) line[i] = 0;
            if (dtype == HW_BFLOAT16) apart(line, wide);
            p[c] = line;
        }
    }
}

// Numbers i ... i + WIDE of such a row; bfloat16 as it lies (HALF) gives the even ones first.
template <bool HALF>
inline void two(const void *p, int64_t i, vec *x) {
    if constexpr (HALF) {
        bits pairs;
        std::memcpy(&pairs, (const uint16_t *)p + i, sizeof pairs);
        x[0] = (vec)(pairs << 16), x[1] = (vec)(pairs & (bits{} + 0xffff0000u));
    } else x[0] = load((const float *)p + i), x[1] = load((const float *)p + i + LANES);
}

// Adds neighbours until one vector is left, whose lanes are the totals of LANES vectors.
template <int HALF = LANES / 2>
inline vec totals(vec *x) {
    ints low, high;
    for (int i = 0; i < LANES; ++i) {
        low[i] = i & HALF ? LANES + i - HALF : i;
        high[i] = i & HALF ? LANES + i : i + HALF;
    }
#pragma GCC unroll 16
    for (int i = 0; i < HALF; ++i)
        x[i] = __builtin_shuffle(x[i], x[i + HALF], low) + __builtin_shuffle(x[i], x[i + HALF], high);
    if constexpr (HALF > 1) return totals<HALF / 2>(x);
    return x[0];
}

// Scores of LANES keys and of R queries at a time, which are MOST numbers apart.
template <int R, bool HALF>
INLINED void dots(int64_t rows, const float *query, const void **p, int64_t deep, float *scores, coming next) {
    constexpr int KEYS = LANES / R;
    if constexpr (R == 1) next.ask_all();
    for (; rows >= R; rows -= R, query += R * MOST, scores += R * SPLIT)
        for (int c = 0; c < LANES; c += KEYS) {
            vec sum[LANES] = {};
            for (int64_t i = 0; i < deep; i += WIDE) {
                vec key[KEYS][2];
#pragma GCC unroll 16
                for (int k = 0; k < KEYS; ++k) {
                    two<HALF>(p[c + k], i, key[k]);
                    if constexpr (R > 1) next.ask<WIDE * (HALF ? 2 : 4)>(i / WIDE * KEYS + k);
                }
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    const vec one = load(query + r * MOST + i), other = load(query + r * MOST + i + LANES);
#pragma GCC unroll 16
                    for (int k = 0; k < KEYS; ++k) sum[r * KEYS + k] += one * key[k][0];
#pragma GCC unroll 16
                    for (int k = 0; k < KEYS; ++k) sum[r * KEYS + k] += other * key[k][1];
                }
            }
            const vec found = totals(sum);
            for (int r = 0; r < R; ++r) std::memcpy(scores + r * SPLIT + c, (const float *)&found + r * KEYS, KEYS * sizeof(float));
        }
    if constexpr (R > 1) dots<R / 2, HALF>(rows, query, p, deep, scores, next);
}

// Adds LANES values to the outputs of R queries at a time, which are each numbers apart.
template <int R, bool HALF>
INLINED void mix(int64_t rows, const float *weights, const void **p, int64_t wide, float *out, int64_t each, coming next) {
    if constexpr (R == 1) next.ask_all();
    for (; rows >= R; rows -= R, weights += R * SPLIT, out += R * each)
        for (int64_t j = 0; j < wide; j += WIDE) {
            vec sum[R][2];
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) sum[r][0] = load(out + r * each + j), sum[r][1] = load(out + r * each + j + LANES);
#pragma GCC unroll 16
            for (int k = 0; k < LANES; ++k) {
                vec value[2];
                two<HALF>(p[k], j, value);
                if constexpr (R > 1) next.ask<WIDE * (HALF ? 2 : 4)>(k);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    const vec weight = all(weights[r * SPLIT + k]);
                    sum[r][0] += weight * value[0], sum[r][1] += weight * value[1];
                }
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) store(out + r * each + j, sum[r][0]), store(out + r * each + j + LANES, sum[r][1]);
        }
    if constexpr (R > 1) mix<R / 2, HALF>(rows, weights, p, wide, out, each, next);
}

void part(const hw_call *x, int64_t b, int64_t kv, int64_t at, int64_t n, float *memory, float *scores) {
    const int64_t group = x->heads / x->kv_heads, rows = group * x->rows, d = x->head_dim, v = x->v_head_dim;
    const int64_t deep = padded(d), wide = padded(v), each = wide + LANES;
    const bool modified = modifies(x), simple = plain(x);
    alignas(64) float query[FEW][MOST], lines[LANES * MOST];
    range sees[FEW];
    int64_t low = n, high = 0;
    for (int64_t r = 0; r < rows; ++r) {
        sees[r] = reach(x, b, kv * group + r / x->rows, r % x->rows);
        const int64_t from = within(sees[r].start - at, 0, n), to = within(sees[r].stop - at, 0, n);
        if (to > from) low = from < low ? from : low, high = to > high ? to : high;
        memory[r * each] = NONE, memory[r * each + 1] = 0;
        std::memset(memory + r * each + LANES, 0, wide * sizeof(float));
    }
    if (high <= low) return;
    at += low, n = high - low;
    for (int64_t r = 0; r < rows; ++r) {
        read_row(query[r], x->query, query_at(x, b, kv * group + r / x->rows, r % x->rows), d, x->dtype, modified ? x->scale : x->scale * LOG2E);
        for (int64_t i = d; i < deep; ++i) query[r][i] = 0;
        if (x->dtype == HW_BFLOAT16) apart(query[r], deep);
    }
    const int64_t bytes = LANES * (d ? d : 1) * (x->dtype == HW_FLOAT32 ? 4 : 2), ahead = (SOON + bytes - 1) / bytes * LANES, full = vectors(n);
    const auto after = [&](int64_t c) {  // what follows the first c rows of keys and then values
        c += ahead;
        return c < full ? coming(x->key, key_at(x, b, kv, at + c), x->key_stride[2], d, x->dtype)
                        : coming(x->value, value_at(x, b, kv, at + c - full), x->value_stride[2], v, x->dtype);
    };
    const void *p[LANES];
    for (int64_t c = 0; c < n; c += LANES) {
        lines_of(p, lines, x->key, key_at(x, b, kv, at + c), x->key_stride[2], n - c, nullptr, d, deep, x->dtype);
        if (x->dtype == HW_BFLOAT16 && d == deep) dots<4, true>(rows, query[0], p, deep, scores + c, after(c));
        else dots<4, false>(rows, query[0], p, deep, scores + c, after(c));
    }
    uint8_t seen[SPLIT];
    bool every = simple;
    for (int64_t r = 0; r < rows; ++r) every &= sees[r].start <= at && sees[r].stop >= at + n;
    std::memset(seen, every, n);
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t h = kv * group + r / x->rows, t = r % x->rows;
        if (modified) modify(x, b, h, t, at, n, scores + r * SPLIT, 1);
        if (!every) hide(x, b, h, t, sees[r], at, n, scores + r * SPLIT, seen);
        state row = {NONE, 0};
        soften(row, scores + r * SPLIT, n, modified ? LOG2E : 1);
        if (x->keep > 0) {
            float by[SPLIT];
            drop(x, b, h, t, at, n, by);
            for (int64_t c = 0; c < n; ++c) scores[r * SPLIT + c] *= by[c];
        }
        memory[r * each] = row.top, memory[r * each + 1] = row.sum;
    }
    for (int64_t c = 0; c < n; c += LANES) {
        bool any = every;
        for (int64_t i = c; i < n && i < c + LANES; ++i) any |= seen[i];
        if (!any) continue;
        lines_of(p, lines, x->value, value_at(x, b, kv, at + c), x->value_stride[2], n - c, every ? nullptr : seen + c, v, wide, x->dtype);
        // weights are 0 beyond the last key, by soften
        if (x->dtype == HW_BFLOAT16 && v == wide) mix<4, true>(rows, scores + c, p, wide, memory + LANES, each, after(full + c));
        else mix<4, false>(rows, scores + c, p, wide, memory + LANES, each, after(full + c));
    }
}

void join(const hw_call *x, int64_t b, int64_t kv, int64_t splits, float *memory) {
    const int64_t group = x->heads / x->kv_heads, rows = group * x->rows, wide = padded(x->v_head_dim), each = wide + LANES;
    for (int64_t r = 0; r < rows; ++r) {
        float *first = memory + r * each, *sum = first + LANES;
        state row = {first[0], first[1]};
        for (int64_t i = 1; i < splits; ++i) {  // in the order of the keys
            const float *next = memory + (i * rows + r) * each;
            const float top = next[0] > row.top ? next[0] : row.top, base = top == NONE ? 0 : top;
            const float ours = exp2(row.top - base), theirs = exp2(next[0] - base);
            for (int64_t j = 0; j < wide; ++j) sum[j] = sum[j] * ours + next[LANES + j] * theirs;
            row = {top, row.sum * ours + next[1] * theirs};
        }
        if (x->dtype == HW_BFLOAT16) together(sum, wide);
        finish(x, b, kv * group + r / x->rows, r % x->rows, row, sum);
    }
}

// ---- all of it

inline float *take(int64_t floats) {
#if defined(_WIN32)
    return (float *)_aligned_malloc(floats * sizeof(float), 64);
#else
    return (float *)std::aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64);
#endif
}

inline void give(float *memory) {
#if defined(_WIN32)
    _aligned_free(memory);
#else
    std::free(memory);
#endif
}

// Threads for so many products of numbers: below SMALL they cost more than they save.
inline int threads_for(const hw_call *x, int64_t tasks) {
    const int64_t work = x->batch * x->heads * x->rows * x->slots * (x->head_dim + x->v_head_dim);
    return work < SMALL || tasks < 2 ? 1 : x->threads;
}

int few(const hw_call *x) {
    const int64_t rows = x->heads / x->kv_heads * x->rows, splits = x->slots ? (x->slots + SPLIT - 1) / SPLIT : 1;
    const int64_t pairs = x->batch * x->kv_heads, each = rows * (padded(x->v_head_dim) + LANES);
    float *memory = take(pairs * splits * each);
    if (!memory) return HW_NO_MEMORY;
    const int threads = threads_for(x, pairs * splits);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        alignas(64) float scores[FEW * SPLIT];
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < pairs * splits; ++i) {
            const int64_t at = i % splits * SPLIT, n = x->slots - at < SPLIT ? x->slots - at : SPLIT;
            part(x, i / splits / x->kv_heads, i / splits % x->kv_heads, at, n, memory + i * each, scores);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < pairs; ++i) join(x, i / x->kv_heads, i % x->kv_heads, splits, memory + i * splits * each);
    }
    give(memory);
    return HW_OK;
}

template <bool DUAL>
int many(const hw_call *x) {
    const int64_t blocks = (x->rows + BLOCK - 1) / BLOCK, pairs = x->batch * x->heads;
    int status = HW_OK;
    const int threads = threads_for(x, blocks * pairs);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *memory = take(scratch_floats(x));
        scratch y;
        if (memory) lay_out(y, memory, x);
        else {
#pragma omp atomic write
            status = HW_NO_MEMORY;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < blocks * pairs; ++i) {
            // the last blocks first, which are the longest under a causal mask
            const int64_t n = blocks - 1 - i / pairs, bh = i % pairs, first = n * BLOCK;
            const int64_t rows = x->rows - first < BLOCK ? x->rows - first : BLOCK;
            if (memory) block<DUAL>(x, bh / x->heads, bh % x->heads, first, rows, y);
        }
        if (memory) give(memory);
    }
    return status;
}

int forward(const hw_call *given) {
    const hw_call found = looked_at(given), *x = &found;
    if (!x->batch || !x->heads || !x->rows) return HW_OK;
    if (x->heads / x->kv_heads * x->rows <= FEW && x->slots >= 4 * FEW) return few(x);
#if PAIRS
    // weights are rounded for it, and the gradient of a parameter in float32 adds up what that takes from the output
    const bool learns = x->rest && (x->slopes || x->table || x->bias || x->sinks);
    if (x->dtype == HW_BFLOAT16 && !learns) return many<true>(x);
#endif
    return many<false>(x);
}

}  // namespace ISA
}  // namespace hw
