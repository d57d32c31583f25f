/* Weights while a model is loaded: to bytes as ReferenceInt8.quantize_weight has them, bit by bit, and bytes to panels.
 * Called by several threads at once, each with weights of its own. */

#include <math.h>
#include <string.h>

#include "panels.h"

/* `length` numbers, at most 64, to bytes and their scale: 0 where all are too small, NaN where one is not finite. */
static void quantize_weight_group(const float *x, long length, int8_t *values, float *scale)
{
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512 part[4];
    __mmask16 there[4];
    __m512i largest = _mm512_setzero_si512();
    for (int i = 0; i < 4; i++) {
        const long left = length - 16 * i;
        there[i] = left >= 16 ? 0xffff : left > 0 ? (__mmask16)((1u << left) - 1) : 0;
        part[i] = _mm512_maskz_loadu_ps(there[i], x + 16 * i);
        /* Without their sign, bits are in the order of the numbers; NaN comes after infinity. */
        largest = _mm512_max_epi32(largest, _mm512_and_si512(_mm512_castps_si512(part[i]), magnitude));
    }
    const int32_t bits = _mm512_reduce_max_epi32(largest);
    if (bits >= 0x7f800000) {
        *scale = NAN;
        memset(values, 0, length);
        return;
    }
    float size;
    memcpy(&size, &bits, sizeof size);
    size /= 127.0f;
    if (size < 1.17549435e-38f)
        size = 0; /* too coarse a number to divide by */
    *scale = size;
    const __m512 divisor = _mm512_set1_ps(size == 0 ? 1.0f : size);
    for (int i = 0; i < 4; i++) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_div_ps(part[i], divisor));
        _mm512_mask_cvtepi32_storeu_epi8(values + 16 * i, there[i], whole);
    }
}

/* rows float32 [count, width] to values int8 [count, width] and scales float32 [count, groups of 64 in a row]. */
void batchinfer_quantize_weight(const float *rows, long count, long width, int8_t *values, float *scales)
{
    const long groups = (width + GROUP - 1) / GROUP;
    for (long n = 0; n < count; n++, rows += width, values += width)
        for (long g = 0, at = 0; g < groups; g++, at += GROUP) {
            const long left = width - at;
            quantize_weight_group(
                rows + at, left < GROUP ? left : GROUP, values + at, scales + n * groups + g);
        }
}

/* Sixteen features, `values` int8 [16, width] and `scales` [16, groups], to a panel's first half, or, where `to` is 64
 * bytes on, to its second. */
static void pack_half(const int8_t *values, const float *scales, long width, char *to)
{
    const long words = width / 4, groups = width / GROUP;
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i rows = _mm512_mullo_epi32(lanes, _mm512_set1_epi32((int)words)), ones = _mm512_set1_epi8(1);
    const __m512i scale_rows = _mm512_mullo_epi32(lanes, _mm512_set1_epi32((int)groups));
    for (long g = 0; g < groups; g++, values += GROUP, to += RECORD) {
        __m512i sum = _mm512_setzero_si512();
        for (long k = 0; k < GROUP; k += 4) {
            const __m512i four = _mm512_i32gather_epi32(rows, values + k, 4);
            _mm512_storeu_si512(to + VALUES_AT + k * PANEL, four);
            sum = _mm512_dpbusd_epi32(sum, ones, four);
        }
        _mm512_storeu_si512(to + OFFSETS_AT, _mm512_sub_epi32(_mm512_setzero_si512(), sum));
        _mm512_storeu_ps(to, _mm512_i32gather_ps(scale_rows, scales + g, 4));
    }
}

/* Panels as panels.h has them. The first half of panel p are 16 rows of `low` int8 [, width] from row p * step on, with
 * their scales float32 [, groups]; the second half are those of `high`. Whole groups. */
void batchinfer_pack_panels(const int8_t *low, const float *low_scales, const int8_t *high, const float *high_scales,
                            long step, long panels, long width, char *bytes)
{
    const long groups = width / GROUP;
    for (long p = 0; p < panels; p++, bytes += groups * RECORD) {
        const long row = p * step;
        pack_half(low + row * width, low_scales + row * groups, width, bytes);
        pack_half(high + row * width, high_scales + row * groups, width, bytes + 64);
    }
}
