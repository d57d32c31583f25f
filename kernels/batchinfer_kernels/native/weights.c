/* Weights on their way into memory: quantized by groups of 64 inputs, and laid out in panels (`int8.c`).
 *
 * The numbers are those of `batchinfer.quant.int8.quantize_weight` in numpy. One thread: the loader has several.
 */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { GROUP = 64, PANEL = 32 };

/* rows float32 [n, width], width a multiple of 64, to values int8 [n, width] and scales float32 [n, width / 64]. */
void batchinfer_quantize_weight(const float *rows, long n, long width, int8_t *values, float *scales)
{
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const long groups = n * (width / GROUP);
    for (long g = 0; g < groups; g++) {
        const float *x = rows + g * GROUP;
        __m512 part[4];
        __m512i largest_bits = _mm512_setzero_si512();
        for (int i = 0; i < 4; i++) {
            part[i] = _mm512_loadu_ps(x + 16 * i);
            /* Bits of numbers without a sign are in the order of the numbers; NaN comes after infinity. */
            largest_bits = _mm512_max_epi32(largest_bits, _mm512_and_si512(_mm512_castps_si512(part[i]), magnitude));
        }
        const int32_t bits = _mm512_reduce_max_epi32(largest_bits);
        float scale;
        memcpy(&scale, &bits, sizeof scale);
        scale /= 127.0f;
        if (scale < 1.17549435e-38f)
            scale = 0; /* too coarse a number to divide by */
        if (bits >= 0x7f800000) {
            scales[g] = NAN;
            memset(values + g * GROUP, 0, GROUP);
            continue;
        }
        scales[g] = scale;
        const __m512 divisor = _mm512_set1_ps(scale == 0 ? 1.0f : scale);
        for (int i = 0; i < 4; i++) {
            const __m512i whole = _mm512_cvtps_epi32(_mm512_div_ps(part[i], divisor));
            _mm_storeu_si128((__m128i *)(values + g * GROUP + 16 * i), _mm512_cvtepi32_epi8(whole));
        }
    }
}

/* values int8 [features, width], whole panels and groups, to packed [features / 32, width / 4, 2, 16, 4] and offsets
 * int32 [features / 32, width / 64, 32]: minus the sum of each group. */
void batchinfer_pack_bytes(const int8_t *values, long features, long width, int8_t *packed, int32_t *offsets)
{
    const __m512i ones = _mm512_set1_epi8(1);
    const long words = width / 4, groups = width / GROUP;
    for (long panel = 0; panel < features / PANEL; panel++) {
        for (long f = 0; f < PANEL; f++) {
            const int8_t *row = values + (panel * PANEL + f) * width;
            int32_t *out = (int32_t *)packed + panel * words * PANEL + f;
            for (long w = 0; w < words; w++)
                memcpy(out + w * PANEL, row + 4 * w, 4);
            for (long g = 0; g < groups; g++) {
                const __m512i group = _mm512_loadu_si512(row + g * GROUP);
                const __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, group);
                offsets[(panel * groups + g) * PANEL + f] = -_mm512_reduce_add_epi32(sums);
            }
        }
    }
}
