// runtime.hpp   What the emulated instructions ask of the runtime: who runs, who waits for whom, where shared memory
// is.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace cuda_on_cpu {

// As ptx.cuh has them: pointers to these are not pointers to the C library's.
using uint64_t = unsigned long long;
using int64_t = long long;

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

// A place in a kernel's source, for reports.
struct Site {
    const char* file;
    int line;
};
inline Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }

// The running thread, as the kernel sees it.
struct ThreadView {
    uint3 thread_idx, block_idx;
    dim3 block_dim, grid_dim;
    int lane;
    unsigned char* dynamic_smem;
};
extern ThreadView* current;

// Ends the launch with a report of where this thread is; `what` is a printf format.
[[noreturn]] void fail(Site site, const char* what, ...) __attribute__((format(printf, 2, 3)));

// What lanes give to and take from each other in one collective.
constexpr int kSlotWords = 8;
using Slots = uint32_t[32][kSlotWords];

// Waits until every lane of `mask` has come here (lanes that have exited are not waited for), each with its words;
// gives what they brought. `present` are the lanes that came. `aligned` instructions must be one and the same for all
// lanes.
struct Gathered {
    Slots* slots;
    uint32_t present;
};
Gathered gather(uint32_t mask, const char* operation, const uint32_t* words, int num_words, bool aligned, Site site);

// Barrier `id` of the CTA; threads == 0 stands for all that have not exited. With `wait` false it only arrives.
// Returns how many threads came with `vote`.
int barrier(int id, int threads, bool wait, bool vote, const char* operation, Site site);

// Lets others run: what a thread polls may change meanwhile. `changes` says that it does something other than look.
void poll(const char* what, Site site, bool changes = false);

// Before an access to memory: with some seeds, lets others run now and then.
void before_access(const char* operation, Site site);

void pdl_wait_at(Site site);
void pdl_launch_dependents_at(Site site);

// Shared memory. Addresses are those of the shared window, 32 bits; a pointer is given for [address, address + bytes)
// only if all of it belongs to the CTA and the address is a multiple of `alignment`.
unsigned char* shared_pointer(uint32_t address, uint32_t bytes, uint32_t alignment, const char* operation, Site site);
uint32_t shared_address(const void* pointer, Site site);
void* static_shared(size_t offset);
size_t reserve_static_shared(size_t bytes, size_t alignment);

void mbarrier_init_at(uint32_t address, uint32_t arrivals, Site site);
void mbarrier_arrive_at(uint32_t address, uint32_t arrivals, uint32_t expected_bytes, Site site);
bool mbarrier_wait_at(uint32_t address, uint32_t parity, bool may_block, Site site);

// Copies happen at any time from the request on; their destination is poisoned at once.
void bulk_load_at(uint32_t dst, const void* src, uint32_t bytes, uint32_t barrier, Site site);
void bulk_store_at(void* dst, uint32_t src, uint32_t bytes, Site site);
void lane_copy_at(uint32_t dst, const void* src, uint32_t bytes, Site site);
void lane_copies_arrive_at(uint32_t barrier, Site site);
enum class Copies { kBulkStores = 1, kLanes = 2 };
void commit_copies(Copies kind);
void wait_for_copies(Copies kind, int groups_left, Site site);

uint32_t resident_slot();
uint64_t clock_ns();

// ---- tensor core work of a warpgroup, done when it is waited for
void wgmma_fence_at(Site site);
void wgmma_commit_at(Site site);
void wgmma_wait_at(int groups_left, Site site);
enum class Operand { kE4M3, kHalf, kBFloat16 };
void wgmma_at(float* d, int columns, const uint32_t (&a)[4], uint64_t b_descriptor, int scale_d, Operand operand,
              Site site);

// One `__shared__` variable: its place in the CTA's static shared memory, the same in every CTA.
template <class T, int tag, size_t alignment>
struct StaticShared {
    static inline const size_t offset =
        reserve_static_shared(sizeof(T), alignment > alignof(T) ? alignment : alignof(T));
    static T& get() { return *static_cast<T*>(static_shared(offset)); }
};

// Calls a kernel with arguments given as pointers to their values.
template <class... Args>
struct Entry {
    static constexpr size_t kSizes[sizeof...(Args) + 1] = {sizeof(Args)...};

    template <size_t... i>
    static void call(void (*kernel)(Args...), void* const* values, std::index_sequence<i...>) {
        kernel(load<Args>(values[i])...);
    }
    template <class T>
    static T load(const void* value) {
        T copy;
        std::memcpy(&copy, value, sizeof copy);
        return copy;
    }
};
template <class... Args>
inline void call_kernel(void (*kernel)(Args...), void* const* values) {
    Entry<Args...>::call(kernel, values, std::index_sequence_for<Args...>());
}
template <class... Args>
inline size_t argument_sizes(void (*)(Args...), const size_t** sizes) {
    *sizes = Entry<Args...>::kSizes;
    return sizeof...(Args);
}

}  // namespace cuda_on_cpu
