// faults.cpp   A thread that touches memory that is not its own ends the launch with a report, not the process.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>

#include <csignal>

#include "state.hpp"

namespace cuda_on_cpu {

void enter(Machine& run);

namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGVTALRM};
constexpr int kNumSignals = 5;
constexpr int kMostIdleTicks = 4;
struct sigaction before[kNumSignals];
pthread_t launcher;
uint64_t last_turn;
int idle_ticks;

std::string where(const void* context) {
#if defined(__x86_64__)
    auto* at = reinterpret_cast<void*>(static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
    Dl_info info;
    if (dladdr(at, &info) && info.dli_fname) {
        char text[32];
        snprintf(text, sizeof text, "+%#zx", size_t(static_cast<char*>(at) - static_cast<char*>(info.dli_fbase)));
        return std::string(" at [") + info.dli_fname + text + "]";
    }
#endif
    (void)context;
    return "";
}

std::string describe(int signal, const void* address) {
    if (signal == SIGFPE) return "integer division by zero";
    if (signal == SIGILL) return "undefined behaviour (alignment, bounds or shift)";
    for (const auto& cta : machine->resident) {
        if (cta->memory.guards(address)) {
            const auto offset = static_cast<const unsigned char*>(address) - cta->window - cta->dynamic_start;
            return "access to byte " + std::to_string(offset) + " of dynamic shared memory; the launch asked for " +
                   std::to_string(cta->grid->spec.dynamic_smem);
        }
        for (const Fiber& fiber : cta->fibers)
            if (fiber.stack->guards(address)) return "stack overflow";
    }
    char text[64];
    snprintf(text, sizeof text, "access to address %p, which is not mapped", address);
    return text;
}

// A signal to this thread every half second of its processor time.
timer_t start_ticker() {
    sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = SIGVTALRM;
    event._sigev_un._tid = pid_t(syscall(SYS_gettid));
    timer_t ticker;
    if (timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &ticker) != 0) abort();
    const itimerspec ticks{{0, 500000000}, {0, 500000000}};
    timer_settime(ticker, 0, &ticks, nullptr);
    return ticker;
}

// Every tick: a thread that runs on and on reaches no place where others could run.
void on_tick(const void* context) {
    idle_ticks = machine->turns == last_turn ? idle_ticks + 1 : 0;
    last_turn = machine->turns;
    if (idle_ticks >= kMostIdleTicks && current != nullptr)
        abandon(name_of(*running()) + ": runs without end" + where(context));
}

void on_fault(int signal, siginfo_t* info, void* context) {
    if (machine == nullptr || !pthread_equal(pthread_self(), launcher)) {
        // Not ours: what was there before deals with the fault, which comes again.
        for (int i = 0; i < kNumSignals; ++i) sigaction(kSignals[i], &before[i], nullptr);
        return;
    }
    if (signal == SIGVTALRM) return on_tick(context);
    const std::string who = current ? name_of(*running()) : "the copy engine";
    abandon(who + ": " + describe(signal, info->si_addr) + where(context));
}

}  // namespace

std::string run_guarded(Machine& run) {
    Guarded handler_stack;
    handler_stack.map(256 * 1024);
    stack_t ours{}, theirs{};
    ours.ss_sp = handler_stack.base;
    ours.ss_size = handler_stack.bytes;
    sigaltstack(&ours, &theirs);
    struct sigaction action{};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    launcher = pthread_self();
    last_turn = 0;
    idle_ticks = 0;
    for (int i = 0; i < kNumSignals; ++i) sigaction(kSignals[i], &action, &before[i]);
    timer_t ticker = start_ticker();
    enter(run);
    timer_delete(ticker);
    for (int i = 0; i < kNumSignals; ++i) sigaction(kSignals[i], &before[i], nullptr);
    sigaltstack(&theirs, nullptr);
    handler_stack.unmap();
    return run.report;
}

}  // namespace cuda_on_cpu
