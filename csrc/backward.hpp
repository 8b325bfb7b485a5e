// Attention, backward, for the instruction set of the file that includes this one after forward.hpp. The weights are
// computed again from the log-sum-exp (Dao et al., FlashAttention, 2022, section 3.1 and appendix B). One task is one
// head of one sequence, whatever the number of threads; what heads share is summed in their order afterwards.

namespace hw {
namespace ISA {

constexpr int SOME = 16 * ROWS;  // query rows that are taken together
// Numbers between rows of weights, which are read by columns: at a power of two these would fall on few places of the cache
// and drive each other out.
constexpr int STEP = TILE + 16;

// c[R][WIDE] += a[R][n] b[n][WIDE]; with TURNED a is given by columns. A step of b is b_step numbers.
template <int R, bool TURNED>
inline void add(int64_t n, const float *a, int64_t a_stride, const float *b, int64_t b_step, float *c, int64_t c_stride) {
    vec sum[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sum[r][0] = load(c + r * c_stride), sum[r][1] = load(c + r * c_stride + LANES);
#pragma GCC unroll 2
    for (int64_t i = 0; i < n; ++i) {
        const vec b0 = load(b + i * b_step), b1 = load(b + i * b_step + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const vec x = all(TURNED ? a[i * a_stride + r] : a[r * a_stride + i]);
            sum[r][0] += x * b0;
            sum[r][1] += x * b1;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) store(c + r * c_stride, sum[r][0]), store(c + r * c_stride + LANES, sum[r][1]);
}

template <bool TURNED, int R = ROWS>
inline void add_of(int64_t rows, int64_t n, const float *a, int64_t a_stride, const float *b, int64_t b_step, float *c, int64_t c_stride) {
    if (rows == R) return add<R, TURNED>(n, a, a_stride, b, b_step, c, c_stride);
    if constexpr (R > 1) add_of<TURNED, R - 1>(rows, n, a, a_stride, b, b_step, c, c_stride);
}

// What a task holds; query and out_grad are of all its rows, keys and values of a tile.
struct work {
    float *query, *out_grad, *query_grad, *delta, *lse;
    float *keys, *key_panels, *value_panels, *key_grad, *value_grad;
    float *weights, *score_grad;
    range *sees;
    uint8_t *seen;
};

int64_t work_bytes(const hw_call *x) {
    const int64_t deep = padded(x->head_dim), wide = padded(x->v_head_dim);
    const int64_t floats = x->rows * (2 * deep + wide + 2) + TILE * (3 * deep + 2 * wide) + 2 * SOME * STEP;
    return floats * sizeof(float) + x->rows * sizeof(range) + x->slots + 64;
}

void lay_out(work &y, float *memory, const hw_call *x) {
    const int64_t deep = padded(x->head_dim), wide = padded(x->v_head_dim);
    y.query = memory, y.query_grad = y.query + x->rows * deep, y.out_grad = y.query_grad + x->rows * deep;
    y.keys = y.out_grad + x->rows * wide, y.key_panels = y.keys + TILE * deep, y.key_grad = y.key_panels + TILE * deep;
    y.value_panels = y.key_grad + TILE * deep, y.value_grad = y.value_panels + TILE * wide;
    y.weights = y.value_grad + TILE * wide, y.score_grad = y.weights + SOME * STEP;
    y.delta = y.score_grad + SOME * STEP, y.lse = y.delta + x->rows;
    y.sees = (range *)(y.lse + x->rows);
    y.seen = (uint8_t *)(y.sees + x->rows);
}

inline int64_t out_grad_at(const hw_gradients *g, int64_t b, int64_t h, int64_t t) {
    return b * g->out_grad_stride[0] + h * g->out_grad_stride[1] + t * g->out_grad_stride[2];
}

// A row as float32, zero up to wide.
inline void fill_row(float *to, const void *from, int64_t at, int64_t n, int64_t wide, int32_t dtype, float by = 1) {
    read_row(to, from, at, n, dtype, by);
    for (int64_t i = n; i < wide; ++i) to[i] = 0;
}

// Where some key is hidden by more than ranges: which keys any row of the head sees, and which rows see any.
void look(const hw_call *x, int64_t b, int64_t h, work &y) {
    std::memset(y.seen, 0, x->slots);
    float none[TILE] = {0};
    for (int64_t t = 0; t < x->rows; ++t) {
        bool any = false;
        for (int64_t at = y.sees[t].start; at < y.sees[t].stop; at += TILE) {
            const int64_t n = within(y.sees[t].stop - at, 0, TILE);
            uint8_t open[TILE] = {0};
            hide(x, b, h, t, y.sees[t], at, n, none, open);
            for (int64_t c = 0; c < n; ++c) y.seen[at + c] |= open[c], any |= open[c];
        }
        if (!any) y.sees[t] = {0, 0};
    }
}

// Gradients of keys and values go to rows that lie key_step and value_step numbers apart.
void head_backward(const hw_call *x, const hw_gradients *g, int64_t b, int64_t h, float *key_grads, int64_t key_step,
                   float *value_grads, int64_t value_step, work &y) {
    const int64_t kv = h / (x->heads / x->kv_heads), d = x->head_dim, v = x->v_head_dim, rows = x->rows;
    const int64_t deep = padded(d), wide = padded(v), pair = b * x->heads + h;
    const bool modified = modifies(x), simple = plain(x);
    vec steps;
    for (int i = 0; i < LANES; ++i) steps[i] = (float)i;
    float *slope_grad = g->slopes ? g->slopes + pair : nullptr, *table_grad = g->table ? g->table + pair * x->table_size : nullptr;
    int64_t low = x->slots, high = 0;
    const int64_t nearest = rows ? reach(x, b, h, 0).start : 0;
    for (int64_t r = 0; r < AHEAD; ++r) {  // before anything waits for one of them
        fetch(x->query, query_at(x, b, h, r), d, x->dtype);
        fetch(x->out, out_at(x, b, h, r), v, x->dtype);
        fetch(g->out_grad, out_grad_at(g, b, h, r), v, x->dtype);
        fetch(x->key, key_at(x, b, kv, nearest + r), d, x->dtype);
        fetch(x->value, value_at(x, b, kv, nearest + r), v, x->dtype);
    }
    for (int64_t t = 0; t < rows; ++t) y.sees[t] = reach(x, b, h, t);
    if (!simple) look(x, b, h, y);
    const float into = modified ? LOG2E : 1;
    float sink_grad = 0;
    for (int64_t t = 0; t < rows; ++t) {
        const range sees = y.sees[t];
        float *query = y.query + t * deep, *grad = y.out_grad + t * wide, out[MOST];
        const float lse = x->lse[pair * rows + t];
        fetch(x->query, query_at(x, b, h, t + AHEAD), d, x->dtype);
        fetch(x->out, out_at(x, b, h, t + AHEAD), v, x->dtype);
        fetch(g->out_grad, out_grad_at(g, b, h, t + AHEAD), v, x->dtype);
        // in a row that sees nothing only the log-sum-exp has a gradient, and that of a sink
        fill_row(grad, g->out_grad, out_grad_at(g, b, h, t), v, wide, x->dtype);
        vec product = {};
        const void *parts[2] = {x->out, x->rest};
        for (const void *part : parts) {
            if (!part) continue;
            fill_row(out, part, out_at(x, b, h, t), v, padded(v), x->dtype);
            for (int64_t i = 0; i < v; i += LANES) product += load(out + i) * load(grad + i);
        }
        float delta = total(product);
        if (sees.start == sees.stop) delta = 0;
        if (g->lse_grad) delta -= g->lse_grad[pair * rows + t];
        if (x->sinks && x->sinks[h] != NONE) sink_grad -= exp2((x->sinks[h] - lse) * LOG2E) * delta;
        y.delta[t] = delta, y.lse[t] = lse * LOG2E;
        if (sees.start == sees.stop) {
            std::memset(query, 0, deep * sizeof(float)), std::memset(grad, 0, wide * sizeof(float));
            continue;
        }
        fill_row(query, x->query, query_at(x, b, h, t), d, deep, x->dtype, modified ? x->scale : x->scale * LOG2E);
        low = sees.start < low ? sees.start : low, high = sees.stop > high ? sees.stop : high;
    }
    if (g->sinks) g->sinks[pair] = sink_grad;
    if (slope_grad) *slope_grad = 0;
    if (table_grad) std::memset(table_grad, 0, x->table_size * sizeof(float));
    std::memset(y.query_grad, 0, rows * deep * sizeof(float));
    for (int64_t s = 0; key_grads && s < x->slots; ++s)
        if (s < low || s >= high) std::memset(key_grads + s * key_step, 0, d * sizeof(float));
    for (int64_t s = 0; value_grads && s < x->slots; ++s)
        if (s < low || s >= high) std::memset(value_grads + s * value_step, 0, v * sizeof(float));
    for (int64_t at = low; at < high; at += TILE) {
        const int64_t n = high - at < TILE ? high - at : TILE;
        for (int64_t c = 0; c < n; ++c) {
            float *key = y.keys + c * deep;
            fetch(x->key, key_at(x, b, kv, at + c + AHEAD), d, x->dtype);
            if (simple || y.seen[at + c]) fill_row(key, x->key, key_at(x, b, kv, at + c), d, deep, x->dtype);
            else std::memset(key, 0, deep * sizeof(float));
        }
        pack_rows<false>(x->key, key_at(x, b, kv, at), x->key_stride[2], d, x->dtype, n, y.key_panels);
        pack_rows<false>(x->value, value_at(x, b, kv, at), x->value_stride[2], v, x->dtype, n, y.value_panels);
        std::memset(y.key_grad, 0, n * deep * sizeof(float));
        std::memset(y.value_grad, 0, n * wide * sizeof(float));
        for (int64_t first = 0; first < rows; first += SOME) {
            const int64_t some = rows - first < SOME ? rows - first : SOME;
            int64_t begin = some, end = 0, left = n, right = 0;  // rows and columns that anything happens in
            int64_t from[SOME / ROWS], to[SOME / ROWS];
            bool open[SOME / ROWS];
            for (int64_t k = 0; k * ROWS < some; ++k) {
                const int64_t r0 = first + k * ROWS, r1 = r0 + (some - k * ROWS < ROWS ? some - k * ROWS : ROWS);
                int64_t start = n, stop = 0;
                for (int64_t t = r0; t < r1; ++t) {
                    const int64_t a = within(y.sees[t].start - at, 0, n), z = within(y.sees[t].stop - at, 0, n);
                    if (z > a) start = a < start ? a : start, stop = z > stop ? z : stop;
                }
                open[k] = simple && start % WIDE == 0;
                for (int64_t t = r0; t < r1; ++t) open[k] &= y.sees[t].start <= at + start && y.sees[t].stop >= at + stop;
                from[k] = stop > start ? start / WIDE * WIDE : 0, to[k] = stop;
                if (stop <= start) continue;
                begin = r0 - first < begin ? r0 - first : begin, end = r1 - first;
                left = from[k] < left ? from[k] : left, right = stop > right ? stop : right;
            }
            if (end <= begin) continue;
            for (int64_t k = begin / ROWS; k * ROWS < end; ++k) {
                const int64_t r0 = k * ROWS, count = end - r0 < ROWS ? end - r0 : ROWS;
                float *p = y.weights + r0 * STEP, *s = y.score_grad + r0 * STEP;
                products<false>(count, d, y.query + (first + r0) * deep, deep, y.key_panels, from[k], to[k], p, STEP);
                products<false>(count, v, y.out_grad + (first + r0) * wide, wide, y.value_panels, from[k], to[k], s, STEP);
                for (int64_t r = 0; r < count; ++r) {
                    const int64_t t = first + r0 + r, wanted = to[k] - from[k], whole = vectors(wanted);
                    float *weights = p + r * STEP + from[k], *grads = s + r * STEP + from[k], cap[TILE];
                    uint8_t seen[TILE] = {0};
                    if (x->softcap > 0) softcap(x, wanted, weights, cap);
                    if (modified) shift(x, b, h, t, at + from[k], wanted, weights);
                    if (!open[k]) hide(x, b, h, t, y.sees[t], at + from[k], wanted, weights, seen);
                    for (int64_t c = wanted; c < whole; ++c) weights[c] = NONE;
                    const float lse = y.lse[t], delta = y.delta[t];
                    float keep[TILE];
                    if (x->keep > 0) drop(x, b, h, t, at + from[k], wanted, keep);
                    for (int64_t c = wanted; c < whole; ++c) keep[c] = 0;
                    for (int64_t c = 0; c < whole; c += LANES) {
                        const vec score = load(weights + c);
                        const ints hidden = score == NONE;  // its gradient is 0, whatever stands there
                        const vec weight = (vec)((ints)exp2(score * into - lse) & ~hidden);
                        const vec kept = x->keep > 0 ? load(keep + c) : all(1);
                        store(weights + c, weight * kept);
                        store(grads + c, (vec)((ints)(weight * (load(grads + c) * kept - delta)) & ~hidden));
                    }
                    if (slope_grad || table_grad) {
                        const int64_t away = at + from[k] + x->distance - t, middle = x->table_size / 2;
                        if (slope_grad) {  // in float32, for vectors
                            vec sum = {}, distance = all((float)away) + steps;
                            for (int64_t c = 0; c < whole; c += LANES, distance += (float)LANES)
                                sum -= load(grads + c) * (vec)((ints)distance & std::numeric_limits<int32_t>::max());
                            *slope_grad += total(sum);
                        }
                        if (table_grad) {
                            const range part = in_table(x, away, wanted);
                            for (int64_t c = 0; c < part.start; ++c) table_grad[0] += grads[c];
                            float *sum = table_grad + away + middle;
                            for (int64_t c = part.start; c < part.stop; ++c) sum[c] += grads[c];
                            for (int64_t c = part.stop; c < wanted; ++c) table_grad[x->table_size - 1] += grads[c];
                        }
                    }
                    if (g->bias) {
                        float *sum = g->bias + b * g->bias_stride + (h * rows + t) * x->slots + at + from[k];
                        for (int64_t c = 0; c < wanted; ++c) sum[c] += grads[c];
                    }
                    for (int64_t c = 0; x->softcap > 0 && c < wanted; ++c) grads[c] *= cap[c];
                    // what the sums below read beyond the columns of this group
                    for (int64_t c = left; c < from[k]; ++c) p[r * STEP + c] = s[r * STEP + c] = 0;
                    for (int64_t c = to[k]; c < padded(right); ++c) p[r * STEP + c] = s[r * STEP + c] = 0;
                }
                if (to[k] > from[k])
                    for (int64_t j = 0; j < deep; j += WIDE)
                        add_of<false>(count, to[k] - from[k], s + from[k], STEP, y.keys + from[k] * deep + j, deep,
                                      y.query_grad + (first + r0) * deep + j, deep);
            }
            for (int64_t c = left; c < right; c += ROWS) {
                const int64_t count = right - c < ROWS ? right - c : ROWS;
                // rows of which some group reaches these keys
                int64_t r0 = end, r1 = begin;
                for (int64_t k = begin / ROWS; k * ROWS < end; ++k)
                    if (from[k] < c + count && to[k] > c) r0 = k * ROWS < r0 ? k * ROWS : r0, r1 = (k + 1) * ROWS < end ? (k + 1) * ROWS : end;
                if (r1 <= r0) continue;
                for (int64_t j = 0; j < deep; j += WIDE)
                    add_of<true>(count, r1 - r0, y.score_grad + r0 * STEP + c, STEP, y.query + (first + r0) * deep + j, deep, y.key_grad + c * deep + j, deep);
                for (int64_t j = 0; j < wide; j += WIDE)
                    add_of<true>(count, r1 - r0, y.weights + r0 * STEP + c, STEP, y.out_grad + (first + r0) * wide + j, wide, y.value_grad + c * wide + j, wide);
            }
        }
        for (int64_t c = 0; c < n; ++c) {
            if (key_grads) fetch<1>(key_grads, (at + c + AHEAD) * key_step, d, HW_FLOAT32);
            if (value_grads) fetch<1>(value_grads, (at + c + AHEAD) * value_step, v, HW_FLOAT32);
            for (int64_t i = 0; key_grads && i < d; ++i) key_grads[(at + c) * key_step + i] = y.key_grad[c * deep + i] * (modified ? 1 : LN2);
            if (value_grads) std::memcpy(value_grads + (at + c) * value_step, y.value_grad + c * wide, v * sizeof(float));
        }
    }
    if (g->query)
        for (int64_t t = 0; t < rows; ++t) {
            fetch<1>(g->query, ((b * rows + t + AHEAD) * x->heads + h) * d, d, x->dtype);
            write_row(g->query, ((b * rows + t) * x->heads + h) * d, y.query_grad + t * deep, d, x->dtype, x->scale);
        }
}

// The sum of what the heads of a group found, in their order.
void gather(const hw_call *x, const float *from, void *to, int64_t pair, int64_t size) {
    const int64_t group = x->heads / x->kv_heads;
    float sum[MOST];
    for (int64_t s = 0; s < x->slots; ++s) {
        std::memcpy(sum, from + (pair * group * x->slots + s) * size, size * sizeof(float));
        for (int64_t k = 1; k < group; ++k)
            for (int64_t i = 0; i < size; ++i) sum[i] += from[((pair * group + k) * x->slots + s) * size + i];
        write_row(to, ((pair / x->kv_heads * x->slots + s) * x->kv_heads + pair % x->kv_heads) * size, sum, size, x->dtype, 1);
    }
}

int backward(const hw_call *given, const hw_gradients *g) {
    const hw_call found = looked_at(given), *x = &found;
    const int64_t pairs = x->batch * x->heads, shared = x->batch * x->kv_heads;
    if (!pairs || !shared) return HW_OK;
    const bool direct = x->heads == x->kv_heads && x->dtype == HW_FLOAT32;  // each head writes what it finds
    float *key_grads = (float *)g->key, *value_grads = (float *)g->value, *memory = nullptr;
    if (!direct && (g->key || g->value)) {
        const int64_t keys = g->key ? pairs * x->slots * x->head_dim : 0, values = g->value ? pairs * x->slots * x->v_head_dim : 0;
        memory = take(keys + values + 1);
        if (!memory) return HW_NO_MEMORY;
        key_grads = g->key ? memory : nullptr, value_grads = g->value ? memory + keys : nullptr;
    }
    int status = HW_OK;
    // sequences that share the gradient of a bias are one task, in their order
    const int64_t each = g->bias && g->bias_stride == 0 ? x->batch : 1;
    const int threads = threads_for(x, pairs / each);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *mine = take(work_bytes(x) / sizeof(float) + 1);
        work y;
        if (mine) lay_out(y, mine, x);
        else {
#pragma omp atomic write
            status = HW_NO_MEMORY;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < pairs / each; ++task)
            for (int64_t k = 0; mine && k < each; ++k) {
                const int64_t b = each > 1 ? k : task / x->heads, h = task % x->heads, heads = direct ? x->heads : 1;
                const int64_t first = direct ? b * x->slots * heads + h : (b * x->heads + h) * x->slots;  // row of its first key
                head_backward(x, g, b, h, key_grads ? key_grads + first * x->head_dim : nullptr, heads * x->head_dim,
                              value_grads ? value_grads + first * x->v_head_dim : nullptr, heads * x->v_head_dim, y);
            }
        if (mine) give(mine);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < shared; ++i) {
            if (direct || status != HW_OK) continue;
            if (g->key) gather(x, key_grads, g->key, i, x->head_dim);
            if (g->value) gather(x, value_grads, g->value, i, x->v_head_dim);
        }
    }
    if (memory) give(memory);
    return status;
}

}  // namespace ISA
}  // namespace hw
