// The inner loops of planning: chains of runs, searches for gaps to recompute, and tuning. compiled.py and tuner.py
// call them through ctypes.

#include "chains.h"
#include "search.h"
#include "tuner.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace remat;

EXPORT void* outofcore_chains_open(const Step* step) { return new Chains(*step); }

EXPORT void outofcore_chains_close(void* chains) { delete static_cast<Chains*>(chains); }

EXPORT int outofcore_chain(void* chains, Index at, Index count, const Index* targets, double limit, const Index* kind,
                           const Index* fetch, FoundChain* found) {
    return static_cast<Chains*>(chains)->find(at, count, targets, limit, kind, fetch, *found);
}

EXPORT void* outofcore_search_open(const Step* step, const Gaps* gaps) { return new Search(*step, *gaps); }

EXPORT void outofcore_search_close(void* search) { delete static_cast<Search*>(search); }

EXPORT void outofcore_anneal(void* search, Index limit, Index changes, Index work, double hot, std::uint64_t seed,
                             Best* best) {
    static_cast<Search*>(search)->run(limit, changes, work, hot, seed, *best);
}

EXPORT void outofcore_search_restore(void* search, const Index* pairs, Index count) {
    static_cast<Search*>(search)->restore(pairs, count);
}

EXPORT void outofcore_drop(void* search, Index limit, Index need_limit, Index patience, Best* best) {
    static_cast<Search*>(search)->drop(limit, need_limit, patience, *best);
}

EXPORT void outofcore_settle(void* search, Index limit, Index need_limit, Index patience, Best* best) {
    static_cast<Search*>(search)->settle(limit, need_limit, patience, *best);
}

EXPORT void* outofcore_tuner_open(const Step* step, const Gaps* gaps, const Transfers* transfers) {
    return new Tuner(*step, *gaps, *transfers);
}

EXPORT void outofcore_tuner_close(void* tuner) { delete static_cast<Tuner*>(tuner); }

EXPORT int outofcore_tuner_begin(void* tuner, const Index* kind, const Index* fetch, const Index* home,
                                 const Index* spared, const Index* leaving, double slack, Index passes) {
    return static_cast<Tuner*>(tuner)->begin(kind, fetch, home, spared, leaving, slack, passes);
}

EXPORT void outofcore_tuner_tune(void* tuner, Index tries, double recomputes, std::uint64_t seed) {
    static_cast<Tuner*>(tuner)->tune(tries, recomputes, seed);
}

EXPORT void outofcore_tuner_view(void* tuner, View* view) { *view = static_cast<Tuner*>(tuner)->view(); }
