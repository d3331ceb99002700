// wgmma.cpp   Warpgroup matrix products. They are asynchronous: a sum reads as NaN until its product has been waited
// for, and shared memory is read as late as the machine may read it.
#include "numbers.hpp"
#include "state.hpp"

namespace cuda_on_cpu {

namespace {

constexpr uint32_t kWholeWarp = 0xffffffffu;

// Address of bytes [16 * unit, 16 * unit + 16) of row n of a K-major operand, by its descriptor.
uint32_t address_of(uint64_t descriptor, int n, int unit) {
    const auto field = [&](int bit) { return uint32_t(descriptor >> bit & 0x3fffu) << 4; };
    const uint32_t start = field(0), leading = field(16), stride = field(32);
    const int swizzle = int(descriptor >> 62);
    if (swizzle == 0) return start + n / 8 * stride + unit * leading + n % 8 * 16;
    const uint32_t row_bytes = 256u >> swizzle;  // 1: 128, 2: 64, 3: 32
    const uint32_t linear = start + n / 8 * stride + n % 8 * row_bytes + unit * 16;
    return linear ^ ((linear >> 7 & (row_bytes / 16 - 1)) << 4);
}

// This lane's share of one product: two rows of A, which four lanes hold together, times all columns. A row of A or B
// is two units of 16 bytes; a register holds four bytes of one.
template <class Format>
void multiply(std::vector<float>& d, const WarpgroupProduct& product, int fraction_bits, int result_bits) {
    constexpr int kDepth = 256 / Format::kBits, kBytes = Format::kBits / 8;
    const int q = current->lane % 4;
    const auto value = [](const unsigned char* bytes) {
        uint32_t code = 0;
        memcpy(&code, bytes, kBytes);
        return Format::value(code);
    };
    for (int i = 0; i < int(d.size()); ++i) {
        const int column = i / 4 * 8 + q * 2 + i % 2, low_row = i % 4 / 2;
        float a[kDepth], b[kDepth];
        for (int k = 0; k < kDepth; ++k) {
            const int unit = k / (kDepth / 2), byte = k % (kDepth / 2) * kBytes;
            const uint32_t at = address_of(product.descriptor, column, unit);
            a[k] = value(reinterpret_cast<const unsigned char*>(&product.a[byte / 4][unit * 2 + low_row]) + byte % 4);
            b[k] = value(shared_pointer(at, 16, 16, "wgmma", product.site) + byte);
        }
        d[i] =
            tensor_core_sum(a, b, kDepth, product.adds ? d[i] : 0.f, Format::kMinExponent, fraction_bits, result_bits);
    }
}

void multiply(std::vector<float>& d, const WarpgroupProduct& product) {
    if (product.operand == Operand::kE4M3)
        multiply<E4M3>(d, product, 13, 13);
    else if (product.operand == Operand::kHalf)
        multiply<Half>(d, product, 25, 23);
    else
        multiply<BFloat16>(d, product, 25, 23);
}

}  // namespace

void wgmma_fence_at(Site site) {
    gather(kWholeWarp, "warpgroup_arrive", nullptr, 0, true, site);
    running()->warpgroup.fenced = true;
}

void wgmma_at(float* d, int columns, const uint32_t (&a)[4], uint64_t descriptor, int scale_d, Operand operand,
              Site site) {
    Fiber* me = running();
    Cta& cta = *me->cta;
    if (cta.warps.size() % 4) fail(site, "wgmma in a CTA of %zu warps: not whole warpgroups", cta.warps.size());
    if (descriptor >> 49 & 7u) fail(site, "wgmma with a matrix base offset: only 0 is emulated");
    WarpgroupState& state = me->warpgroup;
    if (!state.fenced) fail(site, "wgmma without warpgroup_arrive() since the last warpgroup_wait()");
    const ProductShape shape{descriptor, columns, scale_d != 0, operand};
    auto& shapes = cta.warpgroups[me->warp / 4];
    const size_t index = state.num_products++;
    if (index == shapes.size()) shapes.push_back(shape);
    if (!(shapes[index] == shape))
        fail(site, "wgmma with another descriptor, shape, type or scale than the warpgroup's other threads");
    cta.warps[me->warp].num_products = state.num_products;

    const Gathered all = gather(kWholeWarp, "wgmma", a, 4, true, site);
    WarpgroupProduct product{d, {}, descriptor, operand, scale_d != 0, state.group, site};
    for (int lane = 0; lane < 4; ++lane)
        memcpy(product.a[lane], (*all.slots)[me->lane / 4 * 4 + lane], sizeof product.a[lane]);
    if (state.sums.count(d) == 0) state.sums[d].assign(d, d + columns / 2);
    if (state.sums[d].size() != size_t(columns / 2)) fail(site, "wgmma of two shapes on the same sums without a wait");
    memset(d, kPoison, columns / 2 * sizeof(float));
    state.products.push_back(product);
}

void wgmma_commit_at(Site site) {
    gather(kWholeWarp, "warpgroup_commit", nullptr, 0, true, site);
    ++running()->warpgroup.group;
}

void wgmma_wait_at(int groups_left, Site site) {
    gather(kWholeWarp, "warpgroup_wait", nullptr, 0, true, site);
    WarpgroupState& state = running()->warpgroup;
    std::vector<WarpgroupProduct> later;
    for (const WarpgroupProduct& product : state.products) {
        if (product.group < state.group - groups_left)
            multiply(state.sums[product.d], product);
        else
            later.push_back(product);
    }
    state.products = std::move(later);
    for (auto sum = state.sums.begin(); sum != state.sums.end();) {
        bool pending = false;
        for (const WarpgroupProduct& product : state.products) pending |= product.d == sum->first;
        if (pending) {
            ++sum;
            continue;
        }
        memcpy(sum->first, sum->second.data(), sum->second.size() * sizeof(float));
        sum = state.sums.erase(sum);
    }
    state.fenced = false;
    gather(kWholeWarp, "warpgroup_wait", nullptr, 0, true, site);  // no lane goes on before its warp's sums are there
}

}  // namespace cuda_on_cpu
