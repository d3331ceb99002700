/* ring.pml   The protocol of expert-parallel decode, for the model checker spin: routing, rows, plan, ring, done, replays.

   RANKS ranks make CALLS calls. Each rank has COMM CTAs of role1, COMPUTE CTAs of role2 and role3, each a process, so that
   any of them may be as slow as it likes, and ranks as many calls apart as the protocol lets them be. Before each call a
   rank picks whom its tokens go to: nobody, the next rank, or all (with COARSE not all); each rank that gets tokens makes
   BLOCKS blocks of them. A block has N1 tasks of the first and N2 of the second GEMM; CTAs draw them in the order of role2's
   list, each the next one before it runs the last.
   Waits have no bound here: one that would time out is a deadlock.

   What is checked. Data carry who wrote them (call, or call and block); a read is two steps that must both find what was
   expected: so a read too early, a write under a reader, a stale acceptance is a failed assertion. Each block must be consumed
   by each of its tasks once. A wait that nobody ends is a deadlock (an invalid end state).

   Compile with -DNO_... to take a safeguard away; tests/protocol/test_ring.py shows that each is missed. */

#ifndef RANKS
#define RANKS 2
#endif
#ifndef CALLS
#define CALLS 3
#endif
#ifndef COMM
#define COMM 2
#endif
#ifndef COMPUTE
#define COMPUTE 1
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
#ifndef N1
#define N1 1
#endif
#ifndef N2
#define N2 1
#endif
#ifndef LAG
#define LAG 1
#endif
#ifndef SLOTS
#define SLOTS 3
#endif

/* Ends an atomic step and begins the next. COARSE joins the steps within a rank's ring, for models of several ranks; with
   three, counters of all peers move in one step. */
#ifdef COARSE
#define STEP
#else
#define STEP } atomic {
#endif
#if RANKS == 3
#define PEER_STEP
#else
#define PEER_STEP } atomic {
#endif

/* ---- what lies in a rank's memory; [rank * n + i] ----------------------------------------------------------------- */

/* Symmetric: written by peers. */
byte meta_tag[RANKS * 2 * RANKS];   /* the call of a rank's routing; 0: never written */
byte meta_mask[RANKS * 2 * RANKS];  /* to whom that rank's tokens go */
byte rows[RANKS * COMM];            /* the call whose tokens a CTA of role1 has published */
byte arrived[RANKS * RANKS];
byte finished[RANKS * RANKS];
byte partials[RANKS * RANKS];       /* the call whose results rank s has written for us */

/* Local. */
byte generation[RANKS];             /* calls completed */
byte block_base[RANKS];
byte plan_tag[RANKS];
byte plan_blocks[RANKS];
byte x[RANKS * SLOTS];              /* block identity */
byte info[RANKS * SLOTS];
byte act[RANKS * SLOTS * N1];
byte l1_full[RANKS * SLOTS];
byte l1_empty[RANKS * SLOTS];
byte l2_full[RANKS * SLOTS];        /* a mask, toggled */
byte l2_empty[RANKS * SLOTS];
byte tickets[RANKS];                /* tasks drawn, in all calls */

/* What the model knows, and no kernel reads: routing of the running call, kernels that have ended (the edges of the graph),
   tasks of the second GEMM that have run in this call. */
byte route[RANKS];
byte dispatched[RANKS];
byte computed[RANKS];
byte consumed[RANKS];

#define ALL ((1 << N1) - 1)
#define EVERYONE ((1 << RANKS) - 1)
#define ID(call, block) ((call) * 16 + (block))
#define SLOT(rank, block) (rank * SLOTS + (block_base[rank] + (block)) % SLOTS)
#define USE(rank, block) ((block_base[rank] + (block)) / SLOTS)

#ifdef NO_META_BUFFERS
#define META(at, from, call) ((at * 2) * RANKS + from)
#else
#define META(at, from, call) ((at * 2 + (call) % 2) * RANKS + from)
#endif

#ifdef NO_META_TAG
#define META_CAME(i, call) (meta_tag[i] != 0)
#else
#define META_CAME(i, call) (meta_tag[i] == (call))
#endif

#ifdef NO_PLAN_TAG
#define PLAN_CAME(rank, call) (plan_tag[rank] != 0)
#else
#define PLAN_CAME(rank, call) (plan_tag[rank] == (call))
#endif

#ifdef NO_ARRIVED
#define ROWS_CAME(rank, from, call) true
#else
#ifdef NO_COUNT_OF_CTAS
#define ROWS_CAME(rank, from, call) (arrived[rank * RANKS + from] >= COMM * ((call) - 1) + 1)
#else
#define ROWS_CAME(rank, from, call) (arrived[rank * RANKS + from] >= COMM * (call))
#endif
#endif

#ifdef NO_L1_FULL
#define TOKENS_THERE(slot, use) true
#else
#define TOKENS_THERE(slot, use) (l1_full[slot] >= (use) + 1)
#endif
#ifdef NO_TOKENS_OF_SECOND
#define FILLED(slot, use) true
#else
#define FILLED(slot, use) TOKENS_THERE(slot, use)
#endif
#ifdef NO_LAST_TICKETS
#define FIRST_TICKET(rank, call) (block_base[rank] * (N1 + N2))
#else
#define FIRST_TICKET(rank, call) (block_base[rank] * (N1 + N2) + ((call) - 1) * COMPUTE)
#endif
#ifdef NO_L1_EMPTY
#define TOKENS_READ(slot, use) true
#else
#define TOKENS_READ(slot, use) (l1_empty[slot] >= (use) * N1)
#endif
#ifdef NO_L2_EMPTY
#define BLOCK_READ(slot, use) true
#else
#define BLOCK_READ(slot, use) (l2_empty[slot] >= (use) * N2)
#endif
#ifdef NO_L2_FULL
#define ACT_THERE(slot, use) true
#else
#ifdef NO_TOGGLE
#define ACT_THERE(slot, use) (l2_full[slot] == ALL)
#else
#define ACT_THERE(slot, use) (l2_full[slot] == (((use) % 2 == 0) -> ALL : 0))
#endif
#endif

#ifdef NO_DONE
#define PEER_DONE(rank, from, call) true
#else
#ifdef NO_DONE_OF_IDLE_PEERS
#define PEER_DONE(rank, from, call) ((from != rank && !(route[rank] & (1 << from))) || finished[rank * RANKS + from] >= COMPUTE * (call))
#else
#define PEER_DONE(rank, from, call) (finished[rank * RANKS + from] >= COMPUTE * (call))
#endif
#endif

/* The same of all ranks: a CTA waits for each in turn, and sees nothing by the order in which they come. */
#if RANKS == 1
#define EVERY_META_CAME META_CAME(META(rank, 0, call), call)
#define EVERY_ROW_CAME ROWS_CAME(rank, 0, call)
#define EVERY_PEER_DONE PEER_DONE(rank, 0, call)
#elif RANKS == 2
#define EVERY_META_CAME META_CAME(META(rank, 0, call), call) && META_CAME(META(rank, 1, call), call)
#define EVERY_ROW_CAME ROWS_CAME(rank, 0, call) && ROWS_CAME(rank, 1, call)
#define EVERY_PEER_DONE PEER_DONE(rank, 0, call) && PEER_DONE(rank, 1, call)
#else
#define EVERY_META_CAME META_CAME(META(rank, 0, call), call) && META_CAME(META(rank, 1, call), call) && \
    META_CAME(META(rank, 2, call), call)
#define EVERY_ROW_CAME ROWS_CAME(rank, 0, call) && ROWS_CAME(rank, 1, call) && ROWS_CAME(rank, 2, call)
#define EVERY_PEER_DONE PEER_DONE(rank, 0, call) && PEER_DONE(rank, 1, call) && PEER_DONE(rank, 2, call)
#endif

/* The edges of the graph: role1 and role2 of a call follow role3 and role2 of the one before. role3 need not follow role2:
   with few tokens it does not, and `done` is all that it waits for. */
#define BEGINS (generation[rank] == call - 1 && computed[rank] >= COMPUTE * (call - 1))

/* ---- role1 ---------------------------------------------------------------------------------------------------------- */

/* The source of a block: the (block / BLOCKS)-th rank that sends tokens here. `senders` is a mask. */
inline find_source(senders, block, source) {
    atomic {
        source = 0;
        i = (block) / BLOCKS;
        do
        :: source < RANKS && !(senders & (1 << source)) -> source++
        :: source < RANKS && (senders & (1 << source)) && i > 0 -> i--; source++
        :: source < RANKS && (senders & (1 << source)) && i == 0 -> break
        :: source == RANKS -> assert(false)
        od;
        i = 0
    }
}

inline push_routing(p) {
#ifdef NO_WHOLE_PACKET
    meta_tag[META(p, rank, call)] = call;
    meta_mask[META(p, rank, call)] = route[rank];
#else
    atomic {
        meta_tag[META(p, rank, call)] = call;
        meta_mask[META(p, rank, call)] = route[rank]
    }
#endif
}

/* Reads everyone's routing: it may be that of no other call, whatever the other ranks are doing. */
inline read_routing() {
    for (p : 0 .. RANKS - 1) {
        i = meta_mask[META(rank, p, call)];
        assert(generation[p] != call - 1 || i == route[p]);
        if
        :: i & (1 << rank) -> senders = senders | (1 << p); blocks = blocks + BLOCKS
        :: else
        fi
    }
    i = 0;
    p = 0
}

inline assert_rows() {
    for (p : 0 .. COMM - 1) {
        assert(rows[source * COMM + p] == call)
    }
    p = 0
}

proctype Role1(byte rank; byte cta) {
    byte call, p, i, senders, blocks, block, source;
    for (call : 1 .. CALLS) {
        /* Routing: one packet, by CTA 0; then rows. Each peer sees them when it likes. */
        if
        :: cta == 0 ->
            atomic { BEGINS; push_routing(rank) }
            for (p : 1 .. RANKS - 1) {
                push_routing((rank + p) % RANKS)
            }
        :: cta != 0
        fi;
        atomic {
            BEGINS;
            rows[rank * COMM + cta] = call;
            arrived[rank * RANKS + rank]++;
            PEER_STEP
            for (p : 1 .. RANKS - 1) {
                arrived[((rank + p) % RANKS) * RANKS + rank]++
            }
        }
        atomic {
            EVERY_META_CAME;
            read_routing();
            if
            :: cta == 0 -> plan_blocks[rank] = blocks; plan_tag[rank] = call
            :: cta != 0
            fi
        }
        (EVERY_ROW_CAME);
        block = cta;
        do
        :: block < blocks ->
            atomic { find_source(senders, block, source); assert_rows() }
            atomic {
                TOKENS_READ(SLOT(rank, block), USE(rank, block));
                assert_rows();
                x[SLOT(rank, block)] = ID(call, block);
                STEP
                BLOCK_READ(SLOT(rank, block), USE(rank, block));
                info[SLOT(rank, block)] = ID(call, block);
                l1_full[SLOT(rank, block)] = USE(rank, block) + 1;
                block = block + COMM
            }
        :: else -> break
        od;
        atomic { p = 0; block = 0; source = 0; senders = 0; blocks = 0; dispatched[rank]++ }
    }
}

/* ---- role2 ---------------------------------------------------------------------------------------------------------- */

inline first_gemm(block, task) {
    atomic {
        TOKENS_THERE(SLOT(rank, block), USE(rank, block));
        assert(x[SLOT(rank, block)] == ID(call, block));
        STEP
        assert(x[SLOT(rank, block)] == ID(call, block));
        l1_empty[SLOT(rank, block)]++;
        STEP
        act[SLOT(rank, block) * N1 + task] = ID(call, block);
#ifdef NO_TOGGLE
        l2_full[SLOT(rank, block)] = l2_full[SLOT(rank, block)] | (1 << task)
#else
        l2_full[SLOT(rank, block)] = l2_full[SLOT(rank, block)] ^ (1 << task)
#endif
    }
}

inline read_act(block) {
    for (i : 0 .. N1 - 1) {
        assert(act[SLOT(rank, block) * N1 + i] == ID(call, block))
    }
    assert(info[SLOT(rank, block)] == ID(call, block));
    i = 0
}

/* Results go to the block's owner: the real info names it, the model finds it in the routing. */
inline second_gemm(block) {
    atomic {
        FILLED(SLOT(rank, block), USE(rank, block)) && ACT_THERE(SLOT(rank, block), USE(rank, block));
        read_act(block);
        STEP
        read_act(block);
        for (i : 0 .. RANKS - 1) {
            if
            :: route[i] & (1 << rank) -> senders = senders | (1 << i)
            :: else
            fi
        }
        find_source(senders, block, source);
        partials[source * RANKS + rank] = call;
        source = 0;
        senders = 0;
        consumed[rank]++;
        l2_empty[SLOT(rank, block)]++
    }
}

/* The task after the one that is about to run is drawn. Whoever draws one behind the list draws no more. */
inline run_task(first, block, task) {
    if
    :: place == drawn ->
        atomic { drawn = tickets[rank] - FIRST_TICKET(rank, call); tickets[rank]++ }
        if
        :: first -> first_gemm(block, task)
        :: else -> second_gemm(block)
        fi
    :: else
    fi;
    place++
}

proctype Role2(byte rank; byte cta) {
    byte call, step, task, drawn, place, blocks, senders, source, i;
    for (call : 1 .. CALLS) {
        atomic {
            BEGINS;
            drawn = tickets[rank] - FIRST_TICKET(rank, call);
            tickets[rank]++
        }
        atomic { PLAN_CAME(rank, call); blocks = plan_blocks[rank] }
        do
        :: blocks > 0 && step < blocks + LAG ->
            for (task : 0 .. N1 - 1) {
                if
                :: step < blocks -> run_task(true, step, task)
                :: else
                fi
            }
            for (task : 0 .. N2 - 1) {
                if
                :: step >= LAG -> run_task(false, step - LAG, task)
                :: else
                fi
            }
            step++
        :: else -> break
        od;
        atomic {
            for (i : 1 .. RANKS - 1) {
                finished[((rank + i) % RANKS) * RANKS + rank]++
            }
            PEER_STEP
            finished[rank * RANKS + rank]++;
            STEP
            computed[rank]++;
            i = 0; step = 0; task = 0; drawn = 0; place = 0; blocks = 0
        }
    }
}

/* ---- role3 ---------------------------------------------------------------------------------------------------------- */

inline read_partials() {
    for (p : 0 .. RANKS - 1) {
        assert(!(route[rank] & (1 << p)) || partials[rank * RANKS + p] == call)
    }
    p = 0
}

/* Whom the tokens of the next call go to. */
inline pick_route() {
    if
    :: route[rank] = 0
#if RANKS == 1 || !defined(COARSE)
    :: route[rank] = EVERYONE
#endif
#if RANKS > 1
    :: route[rank] = 1 << ((rank + 1) % RANKS)
#endif
    fi
}

proctype Role3(byte rank) {
    byte call, p;
    for (call : 1 .. CALLS) {
        atomic {
            dispatched[rank] == COMM * call && EVERY_PEER_DONE;
            read_partials()
        }
        atomic {
            read_partials();
            assert(consumed[rank] == plan_blocks[rank] * N2);
            consumed[rank] = 0;
#ifndef NO_BLOCK_BASE
            block_base[rank] = block_base[rank] + plan_blocks[rank];
#endif
            pick_route();
            generation[rank] = call
        }
    }
}

init {
    byte rank, i;
    atomic {
        for (rank : 0 .. RANKS - 1) {
            pick_route();
            for (i : 0 .. COMM - 1) {
                run Role1(rank, i)
            }
            for (i : 0 .. COMPUTE - 1) {
                run Role2(rank, i)
            }
            run Role3(rank)
        }
        rank = 0;
        i = 0
    }
}
