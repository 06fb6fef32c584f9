// Fused elementwise parts of a transformer block, and attention of one decode step, on a CPU.
//
// Compiled on the machine that runs them (build.py), called from ops.py, which says what each computes; whoever calls
// that has the shapes it names.  T is float or bf16; arithmetic is in float.  Where torch rounds to bf16 between two
// operations, so does this: `rounded`.  No result depends on which thread computes it; sums over rows (rms_norm_back)
// depend on how many threads there are.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

typedef int64_t i64;

struct bf16 {
    uint16_t bits;
};

static inline float from_bits(uint32_t u) {
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}

static inline uint32_t to_bits(float f) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    return u;
}

static inline float load(const float x) { return x; }
static inline float load(const bf16 x) { return from_bits((uint32_t)x.bits << 16); }

static inline void store(float& to, float x) { to = x; }
// To the nearest, ties to even.  Of a NaN that comes of bf16 the low bits are 0, so it does not carry into the sign.
static inline void store(bf16& to, float x) {
    const uint32_t u = to_bits(x);
    to.bits = (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

template <class T>
static inline float rounded(float x) {
    T t;
    store(t, x);
    return load(t);
}

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
static inline float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
static inline float fma_(float a, float b, float c) { return a * b + c; }
#endif

// exp to 2 units in the last place, in operations that a compiler makes vectors of; NaN gives NaN.
static inline float exp_(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    const float shifted = fma_(x, 1.44269504f, magic);
    const float n = shifted - magic;
    const float r = fma_(n, 2.12194440e-4f, fma_(n, -0.693359375f, x));
    float p = 1.9875691500e-4f;
    p = fma_(p, r, 1.3981999507e-3f);
    p = fma_(p, r, 8.3334519073e-3f);
    p = fma_(p, r, 4.1665795894e-2f);
    p = fma_(p, r, 1.6666665459e-1f);
    p = fma_(p, r, 5.0000001201e-1f);
    p = fma_(p, r * r, r) + 1.0f;
    return p * from_bits((to_bits(shifted) << 23) + 0x3f800000u);
}

// ---- RMSNorm ----

template <class T>
static void rms_norm(const T* x, const T* w, T* y, float* inverse, i64 rows, i64 H, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 n = 0; n < rows; n++) {
        const T* xn = x + n * H;
        T* yn = y + n * H;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (i64 i = 0; i < H; i++) sum = fma_(load(xn[i]), load(xn[i]), sum);
        const float r = 1.0f / std::sqrt(sum / (float)H + eps);
        if (inverse) inverse[n] = r;
#pragma omp simd
        for (i64 i = 0; i < H; i++) store(yn[i], load(w[i]) * rounded<T>(load(xn[i]) * r));
    }
}

// dx = r (dz - z mean(dz z)), dw = sum over rows of dy z; z = x r, dz = dy w.  dw_parts: (threads, H), zeroed.
template <class T>
static void rms_norm_back(const T* x, const T* w, const float* inverse, const T* dy, T* dx, float* dw_parts, i64 rows,
                          i64 H, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        float* dw = dw_parts ? dw_parts + (i64)t * H : nullptr;
        for (i64 n = rows * t / threads; n < rows * (t + 1) / threads; n++) {
            const T* xn = x + n * H;
            const T* dyn = dy + n * H;
            const float r = inverse[n];
            if (dx) {
                T* dxn = dx + n * H;
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (i64 i = 0; i < H; i++) sum = fma_(load(dyn[i]) * load(w[i]), load(xn[i]) * r, sum);
                const float mean = sum / (float)H;
#pragma omp simd
                for (i64 i = 0; i < H; i++)
                    store(dxn[i], (load(dyn[i]) * load(w[i]) - load(xn[i]) * r * mean) * r);
            }
            if (dw) {
#pragma omp simd
                for (i64 i = 0; i < H; i++) dw[i] = fma_(load(dyn[i]), load(xn[i]) * r, dw[i]);
            }
        }
    }
}

// ---- SwiGLU: pieces of PIECE elements, one thread's each ----

static const i64 PIECE = 4096;

template <class T>
static void swiglu(const T* gate, const T* up, T* out, i64 n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 at = 0; at < n; at += PIECE) {
        const i64 end = at + PIECE < n ? at + PIECE : n;
#pragma omp simd
        for (i64 i = at; i < end; i++) {
            const float g = load(gate[i]);
            store(out[i], rounded<T>(g / (1.0f + exp_(-g))) * load(up[i]));
        }
    }
}

template <class T>
static void swiglu_back(const T* gate, const T* up, const T* dy, T* dgate, T* dup, i64 n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 at = 0; at < n; at += PIECE) {
        const i64 end = at + PIECE < n ? at + PIECE : n;
        if (dgate) {
#pragma omp simd
            for (i64 i = at; i < end; i++) {
                const float g = load(gate[i]), s = 1.0f / (1.0f + exp_(-g));
                const float d = rounded<T>(load(dy[i]) * load(up[i]));
                store(dgate[i], d * s * (1.0f + g * (1.0f - s)));
            }
        }
        if (dup) {
#pragma omp simd
            for (i64 i = at; i < end; i++) {
                const float g = load(gate[i]);
                store(dup[i], rounded<T>(g / (1.0f + exp_(-g))) * load(dy[i]));
            }
        }
    }
}

// ---- Rotary position embedding: x, out (n, h, D) with strides of tokens and heads; cosine and sine (n, D) ----

// sign 1: x c + (-x2, x1) s; sign -1 its transpose, x c + (x2 s2, -x1 s1) with c and s those of the element read.
template <class T>
static void rotary(const T* x, const T* cosine, const T* sine, T* out, i64 n, i64 h, i64 D, i64 x_token, i64 x_head,
                   i64 out_token, i64 out_head, int back, int threads) {
    const i64 half = D / 2;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 t = 0; t < n; t++) {
        const T* c = cosine + t * D;
        const T* s = sine + t * D;
        for (i64 j = 0; j < h; j++) {
            const T* a = x + t * x_token + j * x_head;
            const T* b = a + half;
            T* to = out + t * out_token + j * out_head;
            if (back) {
#pragma omp simd
                for (i64 i = 0; i < half; i++) {
                    const float a_i = load(a[i]), b_i = load(b[i]);
                    store(to[i], rounded<T>(a_i * load(c[i])) + rounded<T>(b_i * load(s[half + i])));
                    store(to[half + i], rounded<T>(b_i * load(c[half + i])) - rounded<T>(a_i * load(s[i])));
                }
            } else {
#pragma omp simd
                for (i64 i = 0; i < half; i++) {
                    const float a_i = load(a[i]), b_i = load(b[i]);
                    store(to[i], rounded<T>(a_i * load(c[i])) - rounded<T>(b_i * load(s[i])));
                    store(to[half + i], rounded<T>(b_i * load(c[half + i])) + rounded<T>(a_i * load(s[half + i])));
                }
            }
        }
    }
}

// ---- One decode step over pages ----

// x (b, g, D), rows of D together, to pool (X, g, z, D) at page[row], at[row].
template <class T>
static void page_write(const T* x, T* pool, const i64* page, const i64* at, i64 b, i64 g, i64 z, i64 D, i64 x_row,
                       i64 x_head) {
    for (i64 n = 0; n < b; n++)
        for (i64 j = 0; j < g; j++)
            std::memcpy(pool + ((page[n] * g + j) * z + at[n]) * D, x + n * x_row + j * x_head, D * sizeof(T));
}

struct Pages {
    const i64* of_prompt;   // (P, J) pages
    const i64* of_row;      // (b, I) pages, counted from `own`
    const i64* lane;        // (b,) prompt * lanes + lane
    const i64* prompt_len;  // (b,)
    const i64* own_len;     // (b,) before the new token, which is there too
    i64 J, I, own, lanes;
};

// Head sizes known when compiling keep a row in registers; S 0 is any other, of `size`.

// scores (r, len) of one page's `count` keys, from column `first`
template <class T, int S>
static inline void page_scores(const float* q, const T* keys, float* scores, i64 r, i64 size, i64 count, i64 len) {
    const i64 D = S ? S : size;
    if (S % 16 == 0 && S) {
        for (i64 k = 0; k < count; k++) {
            float key[S ? S : 1];
#pragma omp simd
            for (i64 i = 0; i < S; i++) key[i] = load(keys[k * S + i]);
            for (i64 j = 0; j < r; j++) {
                const float* qj = q + j * S;
                float lanes[16];
#pragma omp simd
                for (i64 i = 0; i < 16; i++) lanes[i] = qj[i] * key[i];
                for (i64 c = 16; c < S; c += 16)
#pragma omp simd
                    for (i64 i = 0; i < 16; i++) lanes[i] = fma_(qj[c + i], key[c + i], lanes[i]);
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (i64 i = 0; i < 16; i++) sum += lanes[i];
                scores[j * len + k] = sum;
            }
        }
        return;
    }
    for (i64 k = 0; k < count; k++) {
        const T* key = keys + k * D;
        for (i64 j = 0; j < r; j++) {
            const float* qj = q + j * D;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (i64 i = 0; i < D; i++) sum = fma_(qj[i], load(key[i]), sum);
            scores[j * len + k] = sum;
        }
    }
}

template <class T, int S>
static inline void page_values(const float* p, const T* values, float* out, i64 r, i64 size, i64 count, i64 len) {
    const i64 D = S ? S : size;
    for (i64 j = 0; j < r; j++) {
        float* to = out + j * D;
        if (S) {
            float sums[S ? S : 1];
            for (i64 i = 0; i < S; i++) sums[i] = to[i];
            for (i64 k = 0; k < count; k++) {
                const float weight = p[j * len + k];
#pragma omp simd
                for (i64 i = 0; i < S; i++) sums[i] = fma_(weight, load(values[k * S + i]), sums[i]);
            }
            for (i64 i = 0; i < S; i++) to[i] = sums[i];
            continue;
        }
        for (i64 k = 0; k < count; k++) {
            const float weight = p[j * len + k];
#pragma omp simd
            for (i64 i = 0; i < D; i++) to[i] = fma_(weight, load(values[k * D + i]), to[i]);
        }
    }
}

// Own pages lie anywhere: without this each begins with a wait for memory.
template <class T>
static inline void prefetch(const T* page, i64 elements) {
    for (i64 i = 0; i < elements; i += 64 / (i64)sizeof(T)) __builtin_prefetch(page + i);
}

// q, out (b, h, D) with strides; pools (X, g, z, D).
template <class T, int S>
static void paged_attention(const T* q, const T* keys, const T* values, T* out, const Pages* pages, i64 b, i64 h, i64 g,
                            i64 z, i64 D, i64 q_row, i64 q_head, float scale, float softcap, int threads) {
    const i64 r = h / g, J = pages->J, I = pages->I;
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> query(r * D), sums(r * D), scores;
#pragma omp for schedule(dynamic, 1)
        for (i64 task = 0; task < b * g; task++) {
            const i64 n = task / g, j = task % g;
            const i64 before = pages->prompt_len[n], own = pages->own_len[n] + 1, len = before + own;
            if ((i64)scores.size() < r * len) scores.resize(r * len);
            for (i64 m = 0; m < r; m++)
                for (i64 i = 0; i < D; i++) query[m * D + i] = load(q[n * q_row + (j * r + m) * q_head + i]) * scale;
            const i64* shared = pages->of_prompt + pages->lane[n] / pages->lanes * J;
            const i64* mine = pages->of_row + n * I;
            for (i64 k = 0; k < own; k += z) {
                const i64 at = ((pages->own + mine[k / z]) * g + j) * z * D, count = own - k < z ? own - k : z;
                prefetch(keys + at, count * D);
                prefetch(values + at, count * D);
            }
            for (i64 k = 0; k < before; k += z)
                page_scores<T, S>(query.data(), keys + (shared[k / z] * g + j) * z * D, scores.data() + k, r, D,
                            before - k < z ? before - k : z, len);
            for (i64 k = 0; k < own; k += z)
                page_scores<T, S>(query.data(), keys + ((pages->own + mine[k / z]) * g + j) * z * D,
                            scores.data() + before + k, r, D, own - k < z ? own - k : z, len);
            for (i64 m = 0; m < r; m++) {
                float* row = scores.data() + m * len;
                if (softcap > 0)
                    for (i64 k = 0; k < len; k++) row[k] = softcap * std::tanh(row[k] / softcap);
                float top = row[0], sum = 0;
#pragma omp simd reduction(max : top)
                for (i64 k = 0; k < len; k++) top = row[k] > top ? row[k] : top;
#pragma omp simd reduction(+ : sum)
                for (i64 k = 0; k < len; k++) {
                    row[k] = exp_(row[k] - top);
                    sum += row[k];
                }
                const float inverse = 1.0f / sum;
#pragma omp simd
                for (i64 k = 0; k < len; k++) row[k] *= inverse;
            }
            std::memset(sums.data(), 0, sums.size() * sizeof(float));
            for (i64 k = 0; k < before; k += z)
                page_values<T, S>(scores.data() + k, values + (shared[k / z] * g + j) * z * D, sums.data(), r, D,
                            before - k < z ? before - k : z, len);
            for (i64 k = 0; k < own; k += z)
                page_values<T, S>(scores.data() + before + k, values + ((pages->own + mine[k / z]) * g + j) * z * D,
                            sums.data(), r, D, own - k < z ? own - k : z, len);
            for (i64 m = 0; m < r; m++)
                for (i64 i = 0; i < D; i++) store(out[(n * h + j * r + m) * D + i], sums[m * D + i]);
        }
    }
}

#define EXPORT(SUFFIX, T)                                                                                              \
    extern "C" void rms_norm_##SUFFIX(const T* x, const T* w, T* y, float* inverse, i64 rows, i64 H, float eps,        \
                                      int threads) {                                                                   \
        rms_norm<T>(x, w, y, inverse, rows, H, eps, threads);                                                          \
    }                                                                                                                  \
    extern "C" void rms_norm_back_##SUFFIX(const T* x, const T* w, const float* inverse, const T* dy, T* dx,           \
                                           float* dw_parts, i64 rows, i64 H, int threads) {                            \
        rms_norm_back<T>(x, w, inverse, dy, dx, dw_parts, rows, H, threads);                                           \
    }                                                                                                                  \
    extern "C" void swiglu_##SUFFIX(const T* gate, const T* up, T* out, i64 n, int threads) {                          \
        swiglu<T>(gate, up, out, n, threads);                                                                          \
    }                                                                                                                  \
    extern "C" void swiglu_back_##SUFFIX(const T* gate, const T* up, const T* dy, T* dgate, T* dup, i64 n,             \
                                         int threads) {                                                                \
        swiglu_back<T>(gate, up, dy, dgate, dup, n, threads);                                                          \
    }                                                                                                                  \
    extern "C" void rotary_##SUFFIX(const T* x, const T* cosine, const T* sine, T* out, i64 n, i64 h, i64 D,           \
                                    i64 x_token, i64 x_head, i64 out_token, i64 out_head, int back, int threads) {     \
        rotary<T>(x, cosine, sine, out, n, h, D, x_token, x_head, out_token, out_head, back, threads);                 \
    }                                                                                                                  \
    extern "C" void page_write_##SUFFIX(const T* x, T* pool, const i64* page, const i64* at, i64 b, i64 g, i64 z,      \
                                        i64 D, i64 x_row, i64 x_head) {                                                \
        page_write<T>(x, pool, page, at, b, g, z, D, x_row, x_head);                                                   \
    }                                                                                                                  \
    extern "C" void paged_attention_##SUFFIX(const T* q, const T* keys, const T* values, T* out, const Pages* pages,   \
                                             i64 b, i64 h, i64 g, i64 z, i64 D, i64 q_row, i64 q_head, float scale,    \
                                             float softcap, int threads) {                                             \
        auto run = D == 64 ? paged_attention<T, 64> : D == 128 ? paged_attention<T, 128> : paged_attention<T, 0>;      \
        run(q, keys, values, out, pages, b, h, g, z, D, q_row, q_head, scale, softcap, threads);                       \
    }

EXPORT(f32, float)
EXPORT(bf16, bf16)
