// state.hpp   The emulated GPU's state: grids in streams, resident CTAs, warps, threads.
#pragma once
#include <algorithm>
#include <chrono>
#include <deque>
#include <memory>
#include <queue>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "fiber.hpp"
#include "runtime.hpp"

namespace cuda_on_cpu {

constexpr uint32_t kWindowStart = 1024;           // the first bytes of shared memory are the system's
constexpr uint32_t kMaxSharedBytes = 227 * 1024;  // that a CTA can have
constexpr unsigned char kPoison = 0xff;           // NaN in every float format, -1 in every integer
constexpr unsigned char kCanary = 0xa5;

// One kernel launch, as Python gives it.
struct GridSpec {
    const char* name;
    void (*entry)(void* const*);
    void* const* arguments;
    unsigned grid[3], block[3];
    uint32_t dynamic_smem, smem_alignment, static_smem;
    int overlaps_previous;  // programmatic dependent launch
};

struct Options {
    uint64_t seed;      // 0: threads in order; odd: by random priorities; even: at random
    int resident_ctas;  // 0: all
    double timeout_s;
};

struct Cta;
struct Fiber;
struct Grid;

// A collective that some lanes have come to.
struct Meeting {
    uint32_t mask, arrived;
    const char* operation;
    Site site;
    int readers;
    std::vector<Fiber*> waiting;
    Slots slots;
};

struct Warp {
    std::vector<Meeting*> open;  // unfinished collectives, at most one a mask
    uint32_t exited = 0;
    size_t num_products = 0;  // wgmma instructions so far
};

// What the four warps of a warpgroup must agree on in each of their wgmma instructions.
struct ProductShape {
    uint64_t descriptor;
    int columns;
    bool adds;
    Operand operand;
    bool operator==(const ProductShape& other) const {
        return descriptor == other.descriptor && columns == other.columns && adds == other.adds &&
               operand == other.operand;
    }
};

struct Barrier {
    int threads = 0, arrived = 0, votes = 0;
    std::vector<Fiber*> waiting;
};

struct MBarrier {
    uint32_t arrivals = 0, pending = 0;
    int64_t expected_bytes = 0;
    uint32_t phase = 0;
    std::vector<Fiber*> waiting;
};

// A copy that has been requested and not done yet: by the copy engine, or a lane's own cp.async.
struct AsyncCopy {
    enum Kind { kBulkLoad, kBulkStore, kLane } kind;
    Cta* cta;
    Fiber* owner;
    unsigned char* dst;
    const unsigned char* src;
    uint32_t bytes;
    uint32_t barrier;  // of a bulk load
    int group;         // of the owner's copies of this kind
};

// An arrival that a lane's copies make once they are done.
struct LaneArrival {
    int group;
    uint32_t barrier;
};

// One wgmma of one lane: four lanes' registers of A, where B lies, where the sums go.
struct WarpgroupProduct {
    float* d;
    uint32_t a[4][4];  // [lane of the quad][register]
    uint64_t descriptor;
    Operand operand;
    bool adds;
    int group;
    Site site;
};
struct WarpgroupState {
    bool fenced = false;
    int group = 0;  // the one that is being filled
    size_t num_products = 0;
    std::vector<WarpgroupProduct> products;
    std::unordered_map<float*, std::vector<float>> sums;  // what the registers will hold
};

enum class State { kReady, kBlocked, kPolling, kDone };

struct Fiber : ThreadView {
    Context context;
    Guarded* stack;
    Cta* cta;
    int linear, warp;
    State state;
    uint64_t priority;
    const char* waits_for;
    Site site;
    int votes;
    Meeting* meeting;
    WarpgroupState warpgroup;
    int group[3];  // per AsyncCopy::Kind: the group that is being filled; all before it are committed
    std::vector<LaneArrival> lane_arrivals;
};

struct Cta {
    Grid* grid;
    uint32_t slot;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<std::vector<ProductShape>> warpgroups;  // in the order of their wgmma instructions
    Barrier barriers[16];
    std::unordered_map<uint32_t, MBarrier> mbarriers;
    Guarded memory;
    unsigned char* window;  // where address 0 of shared memory would be
    uint32_t dynamic_start, window_end;
    int live, copies_in_flight;
    bool released;
};

struct Grid {
    GridSpec spec;
    Grid* previous;
    std::vector<uint32_t> order;  // CTAs in the order they start
    size_t started = 0, finished = 0, released = 0;
    std::vector<Fiber*> waiting;  // for this grid's end
    bool done() const { return finished == order.size(); }
    bool lets_next_start() const { return started == order.size() && released == order.size(); }
};

struct Stream {
    std::vector<std::unique_ptr<Grid>> grids;
    size_t next = 0;  // the first grid that has CTAs left to start
};

struct Machine {
    Options options;
    std::vector<Stream> streams;
    std::vector<std::unique_ptr<Cta>> resident;
    std::priority_queue<std::pair<uint64_t, Fiber*>> ready;
    std::vector<Fiber*> polling;
    std::deque<AsyncCopy> copies;
    std::vector<std::unique_ptr<Meeting>> meetings;
    std::vector<Meeting*> free_meetings;
    std::mt19937_64 random;
    uint64_t turns = 0;        // fibers run so far
    uint64_t queued = 0;       // times a fiber became ready
    uint64_t clock_ns = 0;     // moves when all that happens is polling
    uint64_t idle_rounds = 0;  // of polling, since something else happened
    uint64_t may_wake = 0;     // turn before which polling threads are not woken while others are ready
    Context main, scheduler;
    Guarded scheduler_stack;
    std::string report;
    std::chrono::steady_clock::time_point idle_since;

    bool by_chance(unsigned one_in) { return options.seed != 0 && random() % one_in == 0; }
};

extern Machine* machine;
inline Fiber* running() { return static_cast<Fiber*>(current); }

// Blocks the running thread until make_ready().
void block(const char* waits_for, Site site);
void make_ready(Fiber* fiber);
void complete_copy(size_t index);
// Ends the run with this report, from any stack.
[[noreturn]] void abandon(std::string report);
std::string place(Site site);
std::string name_of(const Cta& cta);
std::string name_of(const Fiber& fiber);

}  // namespace cuda_on_cpu
