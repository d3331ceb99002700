// fiber.hpp   Stacks and switches between them: one stack a CUDA thread.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace cuda_on_cpu {

constexpr size_t kStackBytes = 128 * 1024;
constexpr size_t kGuardBytes = 4096;

// Memory that ends (and begins) at a page that faults.
struct Guarded {
    unsigned char* base = nullptr;  // the first usable byte
    size_t bytes = 0;

    static size_t pages(size_t bytes) { return (bytes + kGuardBytes - 1) / kGuardBytes * kGuardBytes; }
    void map(size_t wanted) {
        bytes = pages(wanted);
        void* all =
            mmap(nullptr, bytes + 2 * kGuardBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (all == MAP_FAILED) abort();
        base = static_cast<unsigned char*>(all) + kGuardBytes;
        if (mprotect(base, bytes, PROT_READ | PROT_WRITE) != 0) abort();
    }
    void unmap() {
        if (base != nullptr) munmap(base - kGuardBytes, bytes + 2 * kGuardBytes);
        base = nullptr;
    }
    bool guards(const void* address) const {
        const auto* at = static_cast<const unsigned char*>(address);
        return base != nullptr && at >= base - kGuardBytes && at < base + bytes + kGuardBytes &&
               !(at >= base && at < base + bytes);
    }
};

#if defined(__x86_64__)

struct Context {
    void* stack_pointer = nullptr;
};

// Saves the registers that calls preserve on the stack that runs, and goes on with the other one.
extern "C" void cuda_on_cpu_switch(Context* from, const Context* to);  // scheduler.cpp

inline void switch_to(Context& from, Context& to) { cuda_on_cpu_switch(&from, &to); }

// The first switch to `context` calls `start`, which never returns.
inline void prepare(Context& context, const Guarded& stack, void (*start)()) {
    auto** top = reinterpret_cast<void**>(stack.base + stack.bytes);
    *--top = nullptr;  // where a return address would lie: calls find the stack aligned
    *--top = reinterpret_cast<void*>(start);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    context.stack_pointer = top;
}

#else

struct Context {
    ucontext_t registers;
};
inline void switch_to(Context& from, Context& to) { swapcontext(&from.registers, &to.registers); }
inline void prepare(Context& context, const Guarded& stack, void (*start)()) {
    getcontext(&context.registers);
    context.registers.uc_stack.ss_sp = stack.base;
    context.registers.uc_stack.ss_size = stack.bytes;
    context.registers.uc_link = nullptr;
    makecontext(&context.registers, start, 0);
}

#endif

}  // namespace cuda_on_cpu
