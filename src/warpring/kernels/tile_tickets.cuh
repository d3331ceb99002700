// tile_tickets.cuh   How the panels of gate_up are dealt out to CTAs.
#pragma once
#include "tile_routing.cuh"

// What a ticket stands for. gate_up's panels are given out in rounds of gridDim.x tickets, for three quarters of
// what the round before left, and at last for a panel each: few groups, and CTAs that end together.
struct Tickets {
    int num_panels, size, base_panel = 0;
    uint32_t base_ticket = 0;

    __device__ __forceinline__ explicit Tickets(int panels) : num_panels(panels) { resize(); }
    __device__ __forceinline__ void resize() { size = max(1, (num_panels - base_panel) * 3 / int(4 * gridDim.x)); }
    // Panels [first, last) of gate_up; or false, and the unit of down in `first`. Tickets of a caller grow.
    __device__ __forceinline__ bool range(uint32_t ticket, int& first, int& last) {
        while (ticket - base_ticket >= gridDim.x && base_panel + size * int(gridDim.x) < num_panels) {
            base_panel += size * int(gridDim.x);
            base_ticket += gridDim.x;
            resize();
        }
        const uint32_t in_round = ticket - base_ticket, left = ceil_div(num_panels - base_panel, size);
        first = base_panel + int(in_round) * size;
        last = min(first + size, num_panels);
        if (first < num_panels) return true;
        first = int(in_round - left);
        return false;
    }
};
