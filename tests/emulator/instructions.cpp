// instructions.cpp   Collectives, barriers, shared memory and bulk copies.
#include <cstdio>

#include "state.hpp"

namespace cuda_on_cpu {

namespace {

size_t static_bytes = 0;

void leave(Fiber* fiber) {
    if (fiber->meeting != nullptr && --fiber->meeting->readers == 0) machine->free_meetings.push_back(fiber->meeting);
    fiber->meeting = nullptr;
}

bool complete(const Meeting& meeting, const Warp& warp) { return meeting.arrived == (meeting.mask & ~warp.exited); }

void finish(Warp& warp, Meeting* meeting) {
    warp.open.erase(std::find(warp.open.begin(), warp.open.end(), meeting));
    for (Fiber* fiber : meeting->waiting) make_ready(fiber);
    meeting->waiting.clear();
}

Meeting* find_or_open(Warp& warp, uint32_t mask, const char* operation, bool aligned, Site site) {
    for (Meeting* meeting : warp.open) {
        if (meeting->mask != mask) continue;
        const bool same_place = meeting->site.line == site.line && strcmp(meeting->site.file, site.file) == 0;
        if (strcmp(meeting->operation, operation) != 0 || (aligned && !same_place))
            fail(site, "%s by lane %d while other lanes of its mask wait in %s at %s", operation, current->lane,
                 meeting->operation, place(meeting->site).c_str());
        return meeting;
    }
    if (machine->free_meetings.empty()) {
        machine->meetings.push_back(std::make_unique<Meeting>());
        machine->free_meetings.push_back(machine->meetings.back().get());
    }
    Meeting* meeting = machine->free_meetings.back();
    machine->free_meetings.pop_back();
    *meeting = Meeting{mask, 0, operation, site, 0, {}, {}};
    warp.open.push_back(meeting);
    return meeting;
}

void release(Barrier& barrier) {
    for (Fiber* fiber : barrier.waiting) {
        fiber->votes = barrier.votes;
        make_ready(fiber);
    }
    barrier.waiting.clear();
    barrier.arrived = barrier.votes = 0;
}

bool reached(const Barrier& barrier, const Cta& cta) {
    return barrier.arrived > 0 && barrier.arrived == (barrier.threads ? barrier.threads : cta.live);
}

MBarrier& find_mbarrier(uint32_t address, const char* operation, Site site) {
    Cta& cta = *running()->cta;
    uint64_t word;
    memcpy(&word, shared_pointer(address, 8, 8, operation, site), 8);
    const auto found = cta.mbarriers.find(address);
    if (found == cta.mbarriers.end())
        fail(site, "%s of shared address %u, where no mbarrier was initialised", operation, address);
    if (word != (0x6d62617200000000ull | address))
        fail(site, "%s of the mbarrier at %u, which has been overwritten", operation, address);
    return found->second;
}

void settle(MBarrier& barrier) {
    if (barrier.pending != 0 || barrier.expected_bytes != 0) return;
    ++barrier.phase;
    barrier.pending = barrier.arrivals;
    for (Fiber* fiber : barrier.waiting) make_ready(fiber);
    barrier.waiting.clear();
}

}  // namespace

void fiber_ended(Fiber* fiber) {
    Cta& cta = *fiber->cta;
    leave(fiber);
    Warp& warp = cta.warps[fiber->warp];
    warp.exited |= 1u << fiber->lane;
    for (bool again = true; again;) {
        again = false;
        for (Meeting* meeting : warp.open)
            if (complete(*meeting, warp)) {
                finish(warp, meeting);
                again = true;
                break;
            }
    }
    for (Barrier& barrier : cta.barriers)
        if (barrier.threads == 0 && reached(barrier, cta)) release(barrier);
}

Gathered gather(uint32_t mask, const char* operation, const uint32_t* words, int num_words, bool aligned, Site site) {
    Fiber* me = running();
    Warp& warp = me->cta->warps[me->warp];
    leave(me);
    const uint32_t bit = 1u << me->lane;
    if (!(mask & bit))
        fail(site, "%s with mask %#010x, which leaves out lane %d, its caller", operation, mask, me->lane);
    if (aligned && warp.exited) fail(site, "%s after lanes %#010x of the warp have exited", operation, warp.exited);
    Meeting* meeting = find_or_open(warp, mask, operation, aligned, site);
    meeting->arrived |= bit;
    ++meeting->readers;
    me->meeting = meeting;
    if (num_words) memcpy(meeting->slots[me->lane], words, num_words * sizeof(uint32_t));
    if (complete(*meeting, warp)) {
        finish(warp, meeting);
    } else {
        meeting->waiting.push_back(me);
        block(operation, site);
    }
    return {&meeting->slots, meeting->arrived};
}

int barrier(int id, int threads, bool wait, bool vote, const char* operation, Site site) {
    Fiber* me = running();
    Cta& cta = *me->cta;
    if (id < 0 || id >= 16) fail(site, "%s of barrier %d: there are 16", operation, id);
    if (threads < 0 || threads % 32 || size_t(threads) > cta.fibers.size())
        fail(site, "%s for %d threads: not whole warps of a CTA of %zu", operation, threads, cta.fibers.size());
    Barrier& barrier = cta.barriers[id];
    if (barrier.arrived && barrier.threads != threads)
        fail(site, "%s of barrier %d for %d threads, where others wait for %d (0: all)", operation, id, threads,
             barrier.threads);
    barrier.threads = threads;
    ++barrier.arrived;
    barrier.votes += vote;
    if (reached(barrier, cta)) {
        me->votes = barrier.votes;
        release(barrier);
        return me->votes;
    }
    if (!wait) return 0;
    barrier.waiting.push_back(me);
    block(operation, site);
    return me->votes;
}

void pdl_wait_at(Site site) {
    Grid* previous = running()->cta->grid->previous;
    if (previous == nullptr || previous->done()) return;
    previous->waiting.push_back(running());
    block("pdl_wait", site);
}

void pdl_launch_dependents_at(Site) {
    Cta& cta = *running()->cta;
    if (cta.released) return;
    cta.released = true;
    ++cta.grid->released;
}

uint64_t clock_ns() { return machine->clock_ns += 10; }

uint32_t resident_slot() { return running()->cta->slot; }

// ---- shared memory -------------------------------------------------------------------------------------------------

size_t reserve_static_shared(size_t bytes, size_t alignment) {
    const size_t offset = (static_bytes + alignment - 1) / alignment * alignment;
    static_bytes = offset + bytes;
    return offset;
}

void* static_shared(size_t offset) { return running()->cta->window + kWindowStart + offset; }

unsigned char* shared_pointer(uint32_t address, uint32_t bytes, uint32_t alignment, const char* operation, Site site) {
    const Cta& cta = *running()->cta;
    if (address % alignment)
        fail(site, "%s of shared address %u, which is not a multiple of %u", operation, address, alignment);
    const uint32_t static_end = kWindowStart + cta.grid->spec.static_smem;
    const bool in_static = address >= kWindowStart && address + bytes <= static_end;
    const bool in_dynamic = address >= cta.dynamic_start && address + bytes <= cta.window_end;
    if (!in_static && !in_dynamic)
        fail(site, "%s of bytes [%d, %d) of dynamic shared memory; the launch asked for %u", operation,
             int(address - cta.dynamic_start), int(address - cta.dynamic_start + bytes), cta.grid->spec.dynamic_smem);
    return cta.window + address;
}

uint32_t shared_address(const void* pointer, Site site) {
    const Cta& cta = *running()->cta;
    const ptrdiff_t offset = static_cast<const unsigned char*>(pointer) - cta.window;
    if (offset < ptrdiff_t(kWindowStart) || offset > ptrdiff_t(cta.window_end))
        fail(site, "%p is no address of shared memory", pointer);
    return uint32_t(offset);
}

// ---- mbarriers and bulk copies -------------------------------------------------------------------------------------

void mbarrier_init_at(uint32_t address, uint32_t arrivals, Site site) {
    unsigned char* word = shared_pointer(address, 8, 8, "mbarrier_init", site);
    if (arrivals == 0) fail(site, "mbarrier_init for no arrivals");
    const uint64_t mark = 0x6d62617200000000ull | address;
    memcpy(word, &mark, 8);
    MBarrier& barrier = running()->cta->mbarriers[address];
    if (!barrier.waiting.empty()) fail(site, "mbarrier_init of an mbarrier that threads wait for");
    barrier = MBarrier{};
    barrier.arrivals = barrier.pending = arrivals;
}

void mbarrier_arrive_at(uint32_t address, uint32_t arrivals, uint32_t expected_bytes, Site site) {
    MBarrier& barrier = find_mbarrier(address, "mbarrier_arrive", site);
    if (arrivals > barrier.pending) fail(site, "mbarrier_arrive beyond the %u arrivals of the phase", barrier.arrivals);
    barrier.expected_bytes += expected_bytes;
    barrier.pending -= arrivals;
    settle(barrier);
}

bool mbarrier_wait_at(uint32_t address, uint32_t parity, bool may_block, Site site) {
    MBarrier& barrier = find_mbarrier(address, "mbarrier_try_wait", site);
    if (parity > 1) fail(site, "mbarrier_try_wait for parity %u", parity);
    if (barrier.phase % 2 != parity) return true;
    if (!may_block || machine->by_chance(8)) {
        poll("mbarrier_try_wait", site);
    } else {
        barrier.waiting.push_back(running());
        block("mbarrier_try_wait", site);
    }
    return barrier.phase % 2 != parity;
}

namespace {

void request(AsyncCopy::Kind kind, void* dst, const void* src, uint32_t bytes, uint32_t barrier, const char* operation,
             Site site) {
    const uint32_t unit = kind == AsyncCopy::kLane ? bytes : 16;
    for (const void* address : {static_cast<const void*>(dst), src})
        if (bytes == 0 || bytes % unit || reinterpret_cast<size_t>(address) % unit)
            fail(site, "%s of %u bytes from %p to %p: not all multiples of %u", operation, bytes, src, dst, unit);
    Fiber* me = running();
    ++me->cta->copies_in_flight;
    memset(dst, kPoison, bytes);
    machine->copies.push_back({kind, me->cta, me, static_cast<unsigned char*>(dst),
                               static_cast<const unsigned char*>(src), bytes, barrier, me->group[kind]});
}

// Whether some of the owner's copies of that kind, in groups before `end`, are not done yet.
bool pending(const Fiber* owner, AsyncCopy::Kind kind, int end) {
    for (const AsyncCopy& copy : machine->copies)
        if (copy.owner == owner && copy.kind == kind && copy.group < end) return true;
    return false;
}

void arrive(Cta& cta, uint32_t barrier) {
    MBarrier& found = cta.mbarriers[barrier];
    --found.pending;
    settle(found);
}

}  // namespace

void bulk_load_at(uint32_t dst, const void* src, uint32_t bytes, uint32_t barrier, Site site) {
    find_mbarrier(barrier, "bulk_load", site);
    request(AsyncCopy::kBulkLoad, shared_pointer(dst, bytes, 16, "bulk_load", site), src, bytes, barrier, "bulk_load",
            site);
}

void bulk_store_at(void* dst, uint32_t src, uint32_t bytes, Site site) {
    request(AsyncCopy::kBulkStore, dst, shared_pointer(src, bytes, 16, "bulk_store", site), bytes, 0, "bulk_store",
            site);
}

void lane_copy_at(uint32_t dst, const void* src, uint32_t bytes, Site site) {
    request(AsyncCopy::kLane, shared_pointer(dst, bytes, bytes, "cp_async", site), src, bytes, 0, "cp_async", site);
}

void lane_copies_arrive_at(uint32_t barrier, Site site) {
    if (find_mbarrier(barrier, "cp_async_arrive", site).pending == 0)
        fail(site, "cp_async_arrive beyond the arrivals of the phase");
    Fiber* me = running();
    const int group = me->group[AsyncCopy::kLane]++;
    if (pending(me, AsyncCopy::kLane, group + 1))
        me->lane_arrivals.push_back({group, barrier});
    else
        arrive(*me->cta, barrier);
}

void commit_copies(Copies kind) { ++running()->group[int(kind)]; }

void wait_for_copies(Copies kind, int groups_left, Site site) {
    Fiber* me = running();
    while (pending(me, AsyncCopy::Kind(kind), me->group[int(kind)] - groups_left)) block("a wait for copies", site);
}

void complete_copy(size_t index) {
    const AsyncCopy copy = machine->copies[index];
    machine->copies.erase(machine->copies.begin() + index);
    memcpy(copy.dst, copy.src, copy.bytes);
    --copy.cta->copies_in_flight;
    if (copy.kind == AsyncCopy::kBulkLoad) {
        MBarrier& barrier = copy.cta->mbarriers[copy.barrier];
        barrier.expected_bytes -= copy.bytes;
        settle(barrier);
        return;
    }
    Fiber* owner = copy.owner;
    auto& arrivals = owner->lane_arrivals;
    while (!arrivals.empty() && !pending(owner, AsyncCopy::kLane, arrivals.front().group + 1)) {
        arrive(*copy.cta, arrivals.front().barrier);
        arrivals.erase(arrivals.begin());
    }
    if (owner->state == State::kBlocked && strcmp(owner->waits_for, "a wait for copies") == 0) make_ready(owner);
}

}  // namespace cuda_on_cpu

// The static shared memory of the kernel libraries loaded since the last call.
extern "C" size_t cuda_on_cpu_take_static_bytes() {
    const size_t bytes = cuda_on_cpu::static_bytes;
    cuda_on_cpu::static_bytes = 0;
    return bytes;
}
