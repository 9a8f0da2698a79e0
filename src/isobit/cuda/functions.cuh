// Exponential, sigmoid and their kin with the bits of isobit/ops/scalar.py; defined in docs/arithmetic.md, *Functions*.
#pragma once

constexpr float ROUNDING_SHIFT = 12582912.0f;  // 1.5 * 2^23: adding it rounds a small float to a whole number
constexpr float LOG2_E = 0x1.715476p+0f;
constexpr float LN2_HIGH = 0x1.62e4p-1f;
constexpr float LN2_LOW = 0x1.7f7d1cp-20f;
constexpr float EXP_HIGHEST = 90.0f;
constexpr float EXP_LOWEST = -120.0f;

DEVICE float absolute(float x) { return float_of(bits_of(x) & 0x7fffffffu); }

// 2^n for a whole n from -126 to 127.
DEVICE float power_of_two(float n) { return float_of(bits_of(n + (ROUNDING_SHIFT + 127.0f)) << 23); }

struct ExpParts { float scaled, factor; };

// e^x = scaled * factor for x from -120 to 90; factor is a power of two, so the product rounds once.
DEVICE ExpParts exp_parts32(float x) {
    const float n = fma32(x, LOG2_E, ROUNDING_SHIFT) - ROUNDING_SHIFT;
    const float exact = fma32(n, -LN2_HIGH, x);
    const float r = fma32(n, -LN2_LOW, exact);
    const float r_rest = fma32(n, -LN2_LOW, exact - r);
    float q = fma32(0x1.a12528p-13f, r, 0x1.6d4362p-10f);
    q = fma32(q, r, 0x1.1110e0p-7f);
    q = fma32(q, r, 0x1.5554e8p-5f);
    q = fma32(q, r, 0x1.555556p-3f);
    q = fma32(q, r, 0x1.000000p-1f);
    const float p = fma32(q, r * r, r_rest);
    const float scale = fma32(n, 0.5f, ROUNDING_SHIFT) - ROUNDING_SHIFT;
    return {(1.0f + (r + p)) * power_of_two(scale), power_of_two(n - scale)};
}

DEVICE float exp32(float x) {
    float bounded = x > EXP_HIGHEST ? EXP_HIGHEST : x;
    bounded = bounded < EXP_LOWEST ? EXP_LOWEST : bounded;
    const ExpParts parts = exp_parts32(bounded);
    return parts.scaled * parts.factor;
}

// 1 / d for d from 1 to 2, correctly rounded: how a division begins, without the branch for other d that keeps
// neighbours from overlapping.
DEVICE float inverse_from_one_to_two(float d) {
#ifdef EMULATED
    return 1.0f / d;
#else
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
    return fma32(r, fma32(-d, r, 1.0f), r);
#endif
}

// (numerator + rest) / (1 + e) for 0 <= e <= 1.
DEVICE float divide_by_one_plus(float numerator, float rest, float e) {
    const float d = 1.0f + e;
    const float d_rest = e - (d - 1.0f);
    const float inverse = inverse_from_one_to_two(d);
    const float quotient = numerator * inverse;
    float residual = fma32(-quotient, d, numerator);
    residual = fma32(-quotient, d_rest, residual + rest);
    return fma32(residual, inverse, quotient);
}

DEVICE float sigmoid32(float x) {
    const float below = -absolute(x);
    const ExpParts parts = exp_parts32(below < EXP_LOWEST ? EXP_LOWEST : below);
    const bool positive = x >= 0.0f;
    const float numerator = positive ? 1.0f : parts.scaled;
    return divide_by_one_plus(numerator, 0.0f, parts.scaled * parts.factor) * (positive ? 1.0f : parts.factor);
}

DEVICE float silu32(float x) {
    const float below = -absolute(x);
    const float bounded = below < EXP_LOWEST ? EXP_LOWEST : below;
    const ExpParts parts = exp_parts32(bounded);
    const bool positive = x >= 0.0f;
    const float multiplicand = positive ? -bounded : bounded;
    const float multiplier = positive ? 1.0f : parts.scaled;
    const float numerator = multiplicand * multiplier;
    const float rest = fma32(multiplicand, multiplier, -numerator);
    const float value = divide_by_one_plus(numerator, rest, parts.scaled * parts.factor);
    return x > -EXP_LOWEST ? x : value * (positive ? 1.0f : parts.factor);
}

DEVICE float softplus32(float x) {
    const float e = exp32(-absolute(x));
    const float d = fma32(0.5f, e, 1.0f);
    const float d_rest = fma32(0.5f, e, 1.0f - d);
    const float inverse = inverse_from_one_to_two(d);
    const float s = e * inverse;
    const float residual = fma32(-s, d_rest, fma32(-s, d, e));
    const float w = s * s;
    float p = fma32(0x1.dba260p-14f, w, 0x1.bc8cf8p-12f);
    p = fma32(p, w, 0x1.24c926p-9f);
    p = fma32(p, w, 0x1.9998d4p-7f);
    p = fma32(p, w, 0x1.555556p-4f);
    return (x > 0.0f ? x : 0.0f) + (s + fma32(residual, inverse, s * (w * p)));
}

DEVICE float rsqrt32(float x) { return 1.0f / sqrt32(x); }

constexpr double ROUNDING_SHIFT64 = 6755399441055744.0;

DEVICE double infinity64() { return double_of(0x7ff0000000000000ll); }

DEVICE double power_of_two64(int64 n) { return double_of((n + 1023) << 52); }

// Terms of falling power; 1/14! ... 1/2!, each rounded.
DEVICE double exp64(double x) {
    double bounded = x > 710.0 ? 710.0 : x;
    bounded = bounded < -750.0 ? -750.0 : bounded;
    if (bounded != bounded) return bounded;
    const double n = fma64(bounded, 0x1.71547652b82fep+0, ROUNDING_SHIFT64) - ROUNDING_SHIFT64;
    const double exact = fma64(n, -0x1.62e42fee00000p-1, bounded);
    const double r = fma64(n, -0x1.a39ef35793c76p-33, exact);
    const double r_rest = fma64(n, -0x1.a39ef35793c76p-33, exact - r);
    double q = 1.0 / 87178291200.0;
    q = fma64(q, r, 1.0 / 6227020800.0);
    q = fma64(q, r, 1.0 / 479001600.0);
    q = fma64(q, r, 1.0 / 39916800.0);
    q = fma64(q, r, 1.0 / 3628800.0);
    q = fma64(q, r, 1.0 / 362880.0);
    q = fma64(q, r, 1.0 / 40320.0);
    q = fma64(q, r, 1.0 / 5040.0);
    q = fma64(q, r, 1.0 / 720.0);
    q = fma64(q, r, 1.0 / 120.0);
    q = fma64(q, r, 1.0 / 24.0);
    q = fma64(q, r, 1.0 / 6.0);
    q = fma64(q, r, 1.0 / 2.0);
    const double value = 1.0 + (r + fma64(q, r * r, r_rest));
    const int64 whole = static_cast<int64>(n);
    const int64 first = whole >> 1;
    return value * power_of_two64(first) * power_of_two64(whole - first);
}

DEVICE double log64(double x) {
    if (!(x > 0.0)) return x == 0.0 ? -infinity64() : double_of(0x7ff8000000000000ll);
    if (x == infinity64()) return x;
    const bool subnormal = x < 2.2250738585072014e-308;
    const int64 bits = bits_of64(subnormal ? x * 18014398509481984.0 : x);
    int64 exponent = (bits >> 52) - (subnormal ? 1077 : 1023);
    double mantissa = double_of((bits & 0xFFFFFFFFFFFFFll) | 0x3FF0000000000000ll);
    if (mantissa > 0x1.6a09e667f3bcdp+0) {
        mantissa = mantissa * 0.5;
        exponent += 1;
    }
    const double f = mantissa - 1.0;
    const double s = f / (2.0 + f);
    const double w = s * s;
    const double half_square = 0.5 * f * f;
    double q = 2.0 / 25.0;
    q = fma64(q, w, 2.0 / 23.0);
    q = fma64(q, w, 2.0 / 21.0);
    q = fma64(q, w, 2.0 / 19.0);
    q = fma64(q, w, 2.0 / 17.0);
    q = fma64(q, w, 2.0 / 15.0);
    q = fma64(q, w, 2.0 / 13.0);
    q = fma64(q, w, 2.0 / 11.0);
    q = fma64(q, w, 2.0 / 9.0);
    q = fma64(q, w, 2.0 / 7.0);
    q = fma64(q, w, 2.0 / 5.0);
    q = fma64(q, w, 2.0 / 3.0);
    const double series = s * (half_square + w * q);
    const double n = static_cast<double>(exponent);
    if (exponent == 0) return f - (half_square - series);
    return fma64(n, 0x1.62e42fee00000p-1, -((half_square - fma64(n, 0x1.a39ef35793c76p-33, series)) - f));
}
