// scheduler.cpp   Runs grids: every CUDA thread is a fiber, all fibers share one thread of the system, and a seed
// decides who goes on whenever one has to wait. A run is the same every time with the same seed.
#include <cstdarg>
#include <cstdio>
#include <map>

#include "state.hpp"

#if defined(__x86_64__)
asm(R"(
    .text
    .globl cuda_on_cpu_switch
    .hidden cuda_on_cpu_switch
    .type cuda_on_cpu_switch, @function
cuda_on_cpu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq (%rsi), %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size cuda_on_cpu_switch, . - cuda_on_cpu_switch
)");
#endif

namespace cuda_on_cpu {

ThreadView* current = nullptr;
Machine* machine = nullptr;

namespace {

std::vector<Guarded*> free_stacks;

Guarded* take_stack() {
    if (!free_stacks.empty()) {
        Guarded* stack = free_stacks.back();
        free_stacks.pop_back();
        return stack;
    }
    auto* stack = new Guarded;
    stack->map(kStackBytes);
    return stack;
}

void fiber_start() {
    Fiber* me = running();
    const GridSpec& spec = me->cta->grid->spec;
    spec.entry(spec.arguments);
    me = running();
    me->state = State::kDone;
    switch_to(me->context, machine->scheduler);
    abort();
}

void start_cta(Grid& grid, uint32_t index, uint32_t slot) {
    const GridSpec& spec = grid.spec;
    auto cta = std::make_unique<Cta>();
    cta->grid = &grid;
    cta->slot = slot;
    const int threads = int(spec.block[0] * spec.block[1] * spec.block[2]);
    const int warps = (threads + 31) / 32;
    cta->warps.resize(warps);
    cta->warpgroups.resize((warps + 3) / 4);
    cta->live = threads;
    const uint32_t alignment = spec.smem_alignment;
    cta->dynamic_start = (kWindowStart + spec.static_smem + alignment - 1) / alignment * alignment;
    cta->window_end = cta->dynamic_start + spec.dynamic_smem;
    // The window ends where the guard page begins, as nearly as the alignment allows.
    cta->memory.map(cta->window_end + alignment);
    unsigned char* end = cta->memory.base + cta->memory.bytes;
    const size_t start = reinterpret_cast<size_t>(end - cta->window_end) / alignment * alignment;
    cta->window = reinterpret_cast<unsigned char*>(start);
    memset(cta->memory.base, kCanary, cta->memory.bytes);
    memset(cta->window + kWindowStart, kPoison, spec.static_smem);
    memset(cta->window + cta->dynamic_start, kPoison, spec.dynamic_smem);

    // Priorities: a random order of the warps, and of the lanes in them.
    std::vector<uint64_t> warp_priority(warps);
    for (auto& p : warp_priority) p = machine->random();
    cta->fibers.resize(threads);
    for (int i = 0; i < threads; ++i) {
        Fiber& fiber = cta->fibers[i];
        const unsigned x = i % spec.block[0], y = i / spec.block[0] % spec.block[1],
                       z = i / spec.block[0] / spec.block[1];
        fiber = Fiber{};
        fiber.thread_idx = {x, y, z};
        fiber.block_idx = {index % spec.grid[0], index / spec.grid[0] % spec.grid[1],
                           index / spec.grid[0] / spec.grid[1]};
        fiber.block_dim = {spec.block[0], spec.block[1], spec.block[2]};
        fiber.grid_dim = {spec.grid[0], spec.grid[1], spec.grid[2]};
        fiber.lane = i % 32;
        fiber.dynamic_smem = cta->window + cta->dynamic_start;
        fiber.cta = cta.get();
        fiber.linear = i;
        fiber.warp = i / 32;
        fiber.priority = (warp_priority[fiber.warp] & ~0xffffull) | (machine->random() & 0xffffull);
        fiber.stack = take_stack();
        prepare(fiber.context, *fiber.stack, fiber_start);
        make_ready(&fiber);
    }
    machine->resident.push_back(std::move(cta));
}

// A grid of the stream with CTAs left that may start now; null where there is none.
Grid* startable(Stream& stream) {
    while (stream.next < stream.grids.size()) {
        Grid& grid = *stream.grids[stream.next];
        if (grid.started < grid.order.size()) {
            if (grid.previous == nullptr || grid.previous->done()) return &grid;
            return grid.spec.overlaps_previous && grid.previous->lets_next_start() ? &grid : nullptr;
        }
        ++stream.next;
    }
    return nullptr;
}

bool start_ctas() {
    bool any = false;
    const auto limit = size_t(machine->options.resident_ctas);
    while (limit == 0 || machine->resident.size() < limit) {
        std::vector<Grid*> choice;
        for (Stream& stream : machine->streams)
            if (Grid* grid = startable(stream)) choice.push_back(grid);
        if (choice.empty()) break;
        Grid& grid = *choice[machine->options.seed ? machine->random() % choice.size() : 0];
        std::vector<bool> used(machine->resident.size() + 1);
        for (const auto& cta : machine->resident)
            if (cta->slot < used.size()) used[cta->slot] = true;
        uint32_t slot = 0;
        while (used[slot]) ++slot;
        start_cta(grid, grid.order[grid.started++], slot);
        any = true;
    }
    return any;
}

void check_canaries(const Cta& cta) {
    const unsigned char* begin = cta.memory.base;
    const unsigned char* end = begin + cta.memory.bytes;
    const auto check = [&](const unsigned char* from, const unsigned char* to) {
        for (; from < to; ++from)
            if (*from != kCanary)
                abandon(name_of(cta) + ": wrote to byte " + std::to_string(from - cta.window - cta.dynamic_start) +
                        " of dynamic shared memory; the launch asked for " +
                        std::to_string(cta.grid->spec.dynamic_smem));
    };
    check(begin, cta.window + kWindowStart);
    check(cta.window + kWindowStart + cta.grid->spec.static_smem, cta.window + cta.dynamic_start);
    check(cta.window + cta.window_end, end);
}

void check_warpgroups(const Cta& cta) {
    for (size_t w = 0; w < cta.warps.size(); ++w)
        if (cta.warps[w].num_products != cta.warpgroups[w / 4].size())
            abandon(name_of(cta) + ": warp " + std::to_string(w) + " came to " +
                    std::to_string(cta.warps[w].num_products) +
                    " wgmma instructions, another warp of its warpgroup to " +
                    std::to_string(cta.warpgroups[w / 4].size()));
}

void finish_cta(Cta* cta) {
    if (cta->copies_in_flight) abandon(name_of(*cta) + ": ended with copies in flight");
    check_canaries(*cta);
    check_warpgroups(*cta);
    Grid& grid = *cta->grid;
    if (!cta->released) ++grid.released;
    ++grid.finished;
    if (grid.done()) {
        for (Fiber* fiber : grid.waiting) make_ready(fiber);
        grid.waiting.clear();
    }
    for (Fiber& fiber : cta->fibers) free_stacks.push_back(fiber.stack);
    cta->memory.unmap();
    for (size_t i = 0; i < machine->resident.size(); ++i) {
        if (machine->resident[i].get() != cta) continue;
        std::swap(machine->resident[i], machine->resident.back());
        machine->resident.pop_back();
        break;
    }
}

}  // namespace

void fiber_ended(Fiber* fiber);  // instructions.cpp: who waited for it waits no longer

namespace {

// "0-3,7" of a mask.
std::string ranges(uint32_t lanes) {
    std::string text;
    for (int lane = 0; lane < 32; ++lane) {
        if (!(lanes >> lane & 1u)) continue;
        const int first = lane;
        while (lane < 31 && (lanes >> (lane + 1) & 1u)) ++lane;
        text += (text.empty() ? "" : ",") + std::to_string(first) + (lane > first ? "-" + std::to_string(lane) : "");
    }
    return text;
}

// One line for all lanes of a warp that wait at one place.
std::string deadlock_report(const char* why) {
    std::map<std::string, uint32_t> lanes;
    for (const auto& cta : machine->resident)
        for (const Fiber& fiber : cta->fibers)
            if (fiber.state != State::kDone)
                lanes[name_of(*cta) + ", warp " + std::to_string(fiber.warp) + ": " + fiber.waits_for + " at " +
                      place(fiber.site)] |= 1u << fiber.lane;
    std::string report = why;
    int left = 40;
    for (const auto& [where, mask] : lanes) {
        if (left-- == 0) return report + "\n  ...";
        report += "\n  " + where + ", lanes " + ranges(mask);
    }
    return report;
}

void run_fiber(Fiber* fiber) {
    ++machine->turns;
    current = fiber;
    switch_to(machine->scheduler, fiber->context);
    current = nullptr;
    if (fiber->state == State::kPolling)
        machine->polling.push_back(fiber);
    else
        machine->idle_rounds = 0;
    if (fiber->state != State::kDone) return;
    Cta* cta = fiber->cta;
    --cta->live;
    fiber_ended(fiber);
    if (cta->live == 0) finish_cta(cta);
}

void wake_polling() {
    std::vector<Fiber*> polling;
    polling.swap(machine->polling);
    // More turns than they take to look again: of high priority, and many, they would keep the others waiting for ever.
    machine->may_wake = machine->turns + 8 * polling.size();
    for (Fiber* fiber : polling) make_ready(fiber);
}

// Everybody polls. Time goes by, in steps that grow while nothing else happens: waits that are bounded in time give up
// soon, and the same way in every run.
void let_time_pass() {
    constexpr uint64_t kSlowest = 20, kMostRounds = 1 << 22;
    const uint64_t round = machine->idle_rounds++;
    machine->clock_ns += 1000ull << std::min<uint64_t>(round / 64, kSlowest);
    if (round % 1024) return;
    const auto now = std::chrono::steady_clock::now();
    if (round == 0) machine->idle_since = now;
    const std::chrono::duration<double> elapsed = now - machine->idle_since;
    if (elapsed.count() > machine->options.timeout_s || round > kMostRounds)
        abandon(deadlock_report("nothing but polling for too long: what these threads wait for does not come"));
}

void schedule() {
    const bool at_random = machine->options.seed != 0;
    const auto complete_one = [&] {
        complete_copy(at_random ? machine->random() % machine->copies.size() : 0);
        machine->idle_rounds = 0;
    };
    for (;;) {
        if (start_ctas()) machine->idle_rounds = 0;
        if (!machine->copies.empty() && machine->by_chance(8)) complete_one();
        if (!machine->polling.empty() && machine->turns >= machine->may_wake && machine->by_chance(16)) wake_polling();
        if (!machine->ready.empty()) {
            Fiber* fiber = machine->ready.top().second;
            machine->ready.pop();
            run_fiber(fiber);
        } else if (!machine->copies.empty()) {
            complete_one();
        } else if (!machine->polling.empty()) {
            wake_polling();
            let_time_pass();
        } else if (!machine->resident.empty()) {
            abandon(deadlock_report("deadlock: every thread waits"));
        } else {
            return;
        }
    }
}

void scheduler_start() {
    schedule();
    switch_to(machine->scheduler, machine->main);
    abort();
}

}  // namespace

void make_ready(Fiber* fiber) {
    fiber->state = State::kReady;
    const uint64_t seed = machine->options.seed;
    const uint64_t key = seed == 0 ? ~machine->queued++ : seed % 2 ? fiber->priority : machine->random();
    machine->ready.push({key, fiber});
}

void block(const char* waits_for, Site site) {
    Fiber* me = running();
    me->state = State::kBlocked;
    me->waits_for = waits_for;
    me->site = site;
    switch_to(me->context, machine->scheduler);
}

void poll(const char* what, Site site, bool changes) {
    if (changes) machine->idle_rounds = 0;
    Fiber* me = running();
    me->state = State::kPolling;
    me->waits_for = what;
    me->site = site;
    switch_to(me->context, machine->scheduler);
}

void before_access(const char* operation, Site site) {
    if (machine->options.seed % 2 || !machine->by_chance(16)) return;
    Fiber* me = running();
    make_ready(me);
    me->waits_for = operation;
    me->site = site;
    switch_to(me->context, machine->scheduler);
}

void abandon(std::string report) {
    machine->report = std::move(report);
    Context nowhere;
    switch_to(nowhere, machine->main);
    abort();
}

std::string place(Site site) {
    const char* name = strrchr(site.file, '/');
    return std::string(name ? name + 1 : site.file) + ":" + std::to_string(site.line);
}

std::string name_of(const Cta& cta) {
    const uint3 at = cta.fibers[0].block_idx;
    return std::string(cta.grid->spec.name) + ", CTA (" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " +
           std::to_string(at.z) + ")";
}

std::string name_of(const Fiber& fiber) {
    const uint3 at = fiber.thread_idx;
    return name_of(*fiber.cta) + ", thread (" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " +
           std::to_string(at.z) + ")";
}

void fail(Site site, const char* what, ...) {
    char text[512];
    va_list values;
    va_start(values, what);
    vsnprintf(text, sizeof text, what, values);
    va_end(values);
    abandon(name_of(*running()) + ": " + text + " at " + place(site));
}

std::string run_guarded(Machine& run);  // faults.cpp

// Called by faults.cpp with its signal handlers in place.
void enter(Machine& run) {
    run.scheduler_stack.map(4 * kStackBytes);
    prepare(run.scheduler, run.scheduler_stack, scheduler_start);
    switch_to(run.main, run.scheduler);
    current = nullptr;
    run.scheduler_stack.unmap();
    for (const auto& cta : run.resident) {
        for (Fiber& fiber : cta->fibers) free_stacks.push_back(fiber.stack);
        cta->memory.unmap();
    }
}

}  // namespace cuda_on_cpu

using namespace cuda_on_cpu;

// Runs `num_streams` streams of grids to their end. Returns 0, or 1 with what went wrong in `report`.
extern "C" int cuda_on_cpu_run(const GridSpec* grids, const int* grids_of_stream, int num_streams,
                               const Options* options, char* report, size_t report_bytes) {
    Machine run;
    run.options = *options;
    run.random.seed(options->seed);
    machine = &run;
    for (int s = 0; s < num_streams; ++s) {
        Stream stream;
        for (int i = 0; i < grids_of_stream[s]; ++i) {
            auto grid = std::make_unique<Grid>();
            grid->spec = *grids++;
            grid->previous = i ? stream.grids.back().get() : nullptr;
            grid->order.resize(size_t(grid->spec.grid[0]) * grid->spec.grid[1] * grid->spec.grid[2]);
            for (uint32_t c = 0; c < grid->order.size(); ++c) grid->order[c] = c;
            if (options->seed) std::shuffle(grid->order.begin(), grid->order.end(), run.random);
            stream.grids.push_back(std::move(grid));
        }
        run.streams.push_back(std::move(stream));
    }
    const std::string what = run_guarded(run);
    machine = nullptr;
    snprintf(report, report_bytes, "%s", what.c_str());
    return what.empty() ? 0 : 1;
}
