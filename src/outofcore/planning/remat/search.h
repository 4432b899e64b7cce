// Two searches over the gaps that may be recomputed: simulated annealing (see compiled.py) and a greedy search (see
// selection.py).

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <queue>
#include <utility>
#include <vector>

#include "chains.h"

namespace remat {

// The gaps of a step and the bytes held at its ops, without recomputation.
struct Gaps {
    Index count, free_count;
    const Index *end, *bytes, *content, *kind;  // by gap
    const Index* free;                          // the gaps that may be recomputed
    const Index *alone, *held, *before;         // by op, bytes: needed without a chain; of gaps over it; of its inputs
};

// The best state within the limit that a search visited.
struct Best {
    double seconds;      // of all chains; infinite: no visited state was within the limit
    Index bytes;         // the most that large blocks take
    Index count;         // the gaps that are recomputed
    const Index* pairs;  // each of them, and the op before which it is fetched
};

// Random numbers that are the same on every machine (splitmix64: Steele, Lea & Flood, OOPSLA 2014).
class Random {
public:
    explicit Random(std::uint64_t seed) : state_(seed) {}

    // Draw from [0, 1).
    double unit() {
        std::uint64_t z = (state_ += 0x9e3779b97f4a7c15U);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
        return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1.0p-53;
    }

    // Draw from [0, bound).
    Index below(Index bound) { return static_cast<Index>(unit() * static_cast<double>(bound)); }

    Index any_of(const std::vector<Index>& values) { return values[below(static_cast<Index>(values.size()))]; }

private:
    std::uint64_t state_;
};

class Search {
public:
    Search(const Step& step, const Gaps& gaps)
        : s_(step), g_(gaps), chains_(step), kind_(gaps.kind, gaps.kind + gaps.count),
          fetch_(gaps.end, gaps.end + gaps.count), free_(gaps.free, gaps.free + gaps.free_count),
          held_(gaps.held, gaps.held + step.ops), need_(gaps.alone, gaps.alone + step.ops), next_need_(need_),
          over_(step.ops), price_(step.ops), chain_(step.ops), targets_(step.ops), dependents_(step.contents),
          readers_(step.contents), is_tracked_(step.contents) {
        double seconds = 0.0, area = 0.0;
        Index smallest = std::numeric_limits<Index>::max();
        for (const Index g : free_) {
            is_tracked_[g_.content[g]] = true;
            seconds += s_.seconds[s_.maker[g_.content[g]]];
            smallest = std::min(smallest, g_.bytes[g]);
            area += static_cast<double>(g_.bytes[g]) * static_cast<double>(g_.end[g] - s_.start[g]);
        }
        const double count = std::max(static_cast<double>(free_.size()), 1.0);
        // A chain may run slower ops than the ops that make recomputable contents.
        const double whole = std::accumulate(s_.seconds, s_.seconds + s_.ops, 0.0);
        unit_ = std::max({seconds / count, whole / std::max(static_cast<double>(s_.ops), 1.0), 1e-12});
        usual_price_ = unit_ / std::max(area / count, 1.0);
        min_part_ = free_.empty() ? 1 : std::max(smallest / kMinPart, Index{1});
        std::fill(price_.begin(), price_.end(), usual_price_);
        for (Index op = 0; op < s_.ops; ++op) chain_[op].need = need_[op];
    }

    // Try at most `changes` random changes from the present state, and inspect about `work` ops at most. The last state
    // becomes the present one.
    void run(Index limit, Index changes, Index work, double hot, std::uint64_t seed, Best& best) {
        limit_ = need_limit_ = limit, min_overload_ = min_part_, random_ = Random(seed), work_ = 0;
        best.seconds = kAnyTime;
        measure_overload();
        if (is_within()) keep(best);
        double heat = unit_ * hot;
        for (Index turn = 1; turn <= changes && work_ < work && !free_.empty(); ++turn) {
            if (turn % kPriced == 0) {
                const double progress = std::max(static_cast<double>(turn) / static_cast<double>(changes),
                                             static_cast<double>(work_) / static_cast<double>(work));
                heat = unit_ * hot * std::pow(kCold / hot, progress);
                adjust_prices();
            }
            const double max_seconds = seconds_ + penalty_ - heat * std::log(std::max(random_.unit(), 1e-12));
            const bool is_changed = random_.unit() < kSwaps ? try_swap(max_seconds) : try_change(max_seconds);
            if (is_changed && is_within() && seconds_ < best.seconds * (1 - 1e-12)) keep(best);
        }
        best.count = static_cast<Index>(best_.size() / 2);
        best.pairs = best_.data();
    }

    // Go to the state that recomputes these gaps.
    void restore(const Index* pairs, Index count) {
        std::vector<Index> fetch_of(g_.count, kNowhere);
        for (Index i = 0; i < count; ++i) fetch_of[pairs[2 * i]] = pairs[2 * i + 1];
        // Keep all gaps that will change first, since resident contents make more chains possible.
        for (const Index g : free_)
            if (kind_[g] == kRecomputed && fetch_of[g] != fetch_[g]) set(g, kResident, g_.end[g]);
        for (const Index g : free_)
            if (kind_[g] == kResident && fetch_of[g] != kNowhere) set(g, kRecomputed, fetch_of[g]);
        add_seconds();
    }

    // Drop one gap after the other, the one with the fewest seconds per overload removed first, until no op is above
    // the limit; and settle the choices. Stop after inspecting `patience` runs of chains.
    void drop(Index limit, Index need_limit, Index patience, Best& best) {
        begin(limit, need_limit, patience);
        using Rated = std::pair<double, Index>;
        std::priority_queue<Rated, std::vector<Rated>, std::greater<Rated>> cheapest;
        Index fetch = kNowhere;
        double rate = 0.0;
        for (const Index g : free_)
            if (rate_gap(g, rate, fetch)) cheapest.push({rate, g});
        for (Index dropped = 0; !is_within() && !cheapest.empty() && runs_ < patience_;) {
            const Index g = cheapest.top().second;
            cheapest.pop();
            if (!rate_gap(g, rate, fetch)) continue;
            // Rates hardly ever improve when other gaps are dropped, so a gap that is still about the best is the best.
            if (!cheapest.empty() && rate > cheapest.top().first * kAbout) {
                cheapest.push({rate, g});
                continue;
            }
            set(g, kRecomputed, fetch);
            if (++dropped % kDropsBetweenSettlings == 0) settle_all(1, false);
        }
        const bool fits = is_within();
        settle_all(kSettlings, true);
        finish(best, fits);
    }

    // Make every change that saves seconds and adds no overload, but keep no recomputed gap instead.
    void settle(Index limit, Index need_limit, Index patience, Best& best) {
        begin(limit, need_limit, patience);
        settle_all(kSettlings, false);
        finish(best, true);
    }

protected:
    static constexpr Index kNowhere = -1;
    // A gap is dropped even if the next gap's rate is better by up to this factor. Rates of similar gaps worsen slowly,
    // and rating them all after each drop would take most of the time.
    static constexpr double kAbout = 1.001;
    // Number of drops between two settlings of the choices, and the number of rounds in the end.
    static constexpr Index kDropsBetweenSettlings = 10;
    static constexpr int kSettlings = 4;
    // The final temperature, in mean seconds of an op that may run again.
    static constexpr double kCold = 0.001;
    // Number of changes between two adjustments of prices, their factors, and bounds in multiples of the initial price.
    static constexpr int kPriced = 50;
    static constexpr double kRise = 2.0, kFall = 0.9, kCheapest = 1e-2, kDearest = 1e4;
    // The smallest overload that is counted, as a fraction of the smallest gap, since only whole gaps can remove it.
    static constexpr Index kMinPart = 8;
    // The share of changes that exchange two gaps.
    static constexpr double kSwaps = 0.3;
    // Number of gaps that a swap inspects to find a partner.
    static constexpr int kPartners = 8;
    static constexpr double kAnyTime = std::numeric_limits<double>::infinity();

    struct Chain {
        double seconds = 0.0;
        Index need = 0;            // bytes of its op with it, without the gaps held over the op
        std::vector<Index> seen;   // the tracked contents that it reads or makes
        double copying = 0.0;      // seconds of its copies in
        std::vector<Index> reads;  // the contents of gaps that it reads
    };

    // A chain that a change replaces, and the gaps that it fetches.
    struct Replacement {
        Index at = 0;
        Chain chain;
        std::vector<Index> targets;
    };

    // A change before it is applied, and its inverse afterwards.
    struct Change {
        Index gap = 0, kind = 0, fetch = 0, over_count = 0, added = 0;  // bytes of overload
        double seconds = 0.0, penalty = 0.0;
        std::vector<Replacement> replacements;  // the first `count` are in use
        std::size_t count = 0;
    };

    // Bytes of an op above the limit, or the smallest overload if that is more; the op by itself has its own limit.
    Index overload(Index held, Index need) const {
        const Index over = std::max(held + need - limit_, need - need_limit_);
        return over > 0 ? std::max(over, min_overload_) : 0;
    }

    bool is_within() const { return over_count_ == 0; }

    void keep(Best& best) {
        best_.clear();
        for (const Index g : free_)
            if (kind_[g] == kRecomputed) best_.push_back(g), best_.push_back(fetch_[g]);
        add_seconds();
        best.seconds = seconds_;
        best.bytes = 0;
        for (Index op = 0; op < s_.ops; ++op) best.bytes = std::max(best.bytes, held_[op] + need_[op]);
    }

    void begin(Index limit, Index need_limit, Index patience) {
        limit_ = limit, need_limit_ = need_limit, min_overload_ = 1, patience_ = patience, runs_ = 0;
        measure_overload();
    }

    void finish(Best& best, bool fits) {
        keep(best);
        if (!fits) best.seconds = kAnyTime;
        best.count = static_cast<Index>(best_.size() / 2);
        best.pairs = best_.data();
    }

    void find_early_fetches(Index g) {
        early_fetches_.clear();
        for (const Index at : dependents_[g_.content[g]])
            if (s_.start[g] < at && at < g_.end[g]) early_fetches_.push_back(at);
        std::sort(early_fetches_.begin(), early_fetches_.end());
    }

    // Find the seconds per overload removed if a gap is dropped, and the best op to fetch it before.
    bool rate_gap(Index g, double& rate, Index& fetch) {
        const auto begin = over_.begin() + s_.start[g] + 1, end = over_.begin() + g_.end[g];
        if (kind_[g] != kResident || std::none_of(begin, end, [](Index over) { return over > 0; })) return false;
        find_early_fetches(g);
        options_.assign(1, g_.end[g]);
        if (!early_fetches_.empty()) options_.push_back(early_fetches_.front());
        if (early_fetches_.size() > 1) options_.push_back(early_fetches_.back());
        fetch = kNowhere;
        for (const Index at : options_) {
            if (!weigh(g, kRecomputed, at, kAnyTime, changes_[0])) continue;
            drop(changes_[0]);
            const double cost = changes_[0].seconds - seconds_, gain = static_cast<double>(-changes_[0].added);
            if (gain > 0.0 && (fetch == kNowhere || cost / gain < rate)) rate = cost / gain, fetch = at;
        }
        return fetch != kNowhere;
    }

    void settle_all(int rounds, bool may_keep) {
        for (int round = 0; round < rounds; ++round) {
            std::vector<std::pair<Index, Index>> recomputed;
            for (const Index g : free_)
                if (kind_[g] == kRecomputed) recomputed.push_back({fetch_[g], g});
            std::sort(recomputed.begin(), recomputed.end());
            bool is_changed = false;
            for (const auto& entry : recomputed) is_changed = settle_gap(entry.second, may_keep) || is_changed;
            if (!is_changed) return;
        }
    }

    bool settle_gap(Index g, bool may_keep) {
        if (runs_ > patience_) return false;
        find_early_fetches(g);
        options_ = early_fetches_;
        options_.push_back(g_.end[g]);
        if (may_keep) options_.insert(options_.begin(), kNowhere);
        const double before = seconds_;
        double best = 0.0;
        Index chosen = kNowhere - 1;
        for (const Index at : options_) {
            if (at == fetch_[g]) continue;
            const Change& change = changes_[0];
            const Index kind = at == kNowhere ? kResident : kRecomputed;
            if (!weigh(g, kind, at == kNowhere ? g_.end[g] : at, before, changes_[0])) continue;
            drop(change);
            const bool is_better = change.seconds < before * (1 - 1e-12) || change.added < 0;
            if (change.added > 0 || !is_better) continue;
            if (chosen < kNowhere || change.seconds < best) best = change.seconds, chosen = at;
        }
        if (chosen < kNowhere) return false;
        set(g, chosen == kNowhere ? kResident : kRecomputed, chosen == kNowhere ? g_.end[g] : chosen);
        return true;
    }

    // Add up the seconds of all chains, without the rounding errors of incremental changes.
    void add_seconds() {
        seconds_ = 0.0;
        for (const Chain& chain : chain_) seconds_ += chain.seconds;
    }

    void measure_overload() {
        penalty_ = 0.0, over_count_ = 0;
        for (Index op = 0; op < s_.ops; ++op) {
            over_[op] = overload(held_[op], need_[op]);
            over_count_ += over_[op] > 0;
            penalty_ += price_[op] * static_cast<double>(over_[op]);
        }
        work_ += s_.ops;
    }

    void adjust_prices() {
        for (Index op = 0; op < s_.ops; ++op) {
            const double price = price_[op] * (over_[op] > 0 ? kRise : kFall);
            price_[op] = std::clamp(price, usual_price_ * kCheapest, usual_price_ * kDearest);
        }
        measure_overload();
    }

    // Try another residency, or another fetch, of one gap.
    bool try_change(double max_seconds) {
        const Index g = random_.any_of(free_), end = g_.end[g];
        const bool is_recomputed = kind_[g] == kRecomputed;
        options_.clear();
        if (is_recomputed) options_.push_back(kNowhere);  // keep it
        if (!is_recomputed || fetch_[g] != end) options_.push_back(end);
        early_fetches_.clear();
        for (const Index at : dependents_[g_.content[g]])
            if (s_.start[g] < at && at < end) early_fetches_.push_back(at);
        if (!early_fetches_.empty()) {
            const Index at = random_.any_of(early_fetches_);
            if (!is_recomputed || fetch_[g] != at) options_.push_back(at);
        }
        if (options_.empty()) return false;
        const Index fetch = random_.any_of(options_);
        Change& change = changes_[0];
        const Index kind = fetch == kNowhere ? kResident : kRecomputed;
        if (!weigh(g, kind, fetch == kNowhere ? end : fetch, max_seconds, change)) return false;
        if (change.seconds + change.penalty > max_seconds) return drop(change), false;
        apply(change);
        return true;
    }

    // Try to recompute a resident gap and to keep a recomputed one that overlaps it.
    bool try_swap(double max_seconds) {
        const Index g = random_.any_of(free_);
        Index partner = kNowhere;
        for (int tried = 0; tried < kPartners && partner == kNowhere; ++tried) {
            const Index h = random_.any_of(free_);
            const bool overlap = s_.start[h] + 1 < g_.end[g] && s_.start[g] + 1 < g_.end[h];
            if (overlap && (kind_[h] == kRecomputed) != (kind_[g] == kRecomputed)) partner = h;
        }
        if (partner == kNowhere) return false;
        const auto [resident, recomputed] = kind_[g] == kRecomputed ? std::pair(partner, g) : std::pair(g, partner);
        if (!weigh(resident, kRecomputed, g_.end[resident], kAnyTime, changes_[0])) return false;
        apply(changes_[0]);
        if (!weigh(recomputed, kResident, g_.end[recomputed], max_seconds, changes_[1]))
            return apply(changes_[0]), false;
        if (changes_[1].seconds + changes_[1].penalty > max_seconds)
            return drop(changes_[1]), apply(changes_[0]), false;
        apply(changes_[1]);
        return true;
    }

    // Change a gap at any cost.
    void set(Index g, Index kind, Index fetch) {
        if (weigh(g, kind, fetch, kAnyTime, changes_[0])) apply(changes_[0]);
    }

    Replacement& replacement(Change& change, Index at) {
        for (std::size_t i = 0; i < change.count; ++i)
            if (change.replacements[i].at == at) return change.replacements[i];
        if (change.count == change.replacements.size()) change.replacements.emplace_back();
        Replacement& added = change.replacements[change.count++];
        added.at = at;
        added.targets = targets_[at];
        return added;
    }

    // The op from which a gap is held, up to its end.
    Index held_from(Index g, Index kind, Index fetch) const { return kind == kRecomputed ? fetch : s_.start[g] + 1; }

    // Compute the effects of a change; false if it is impossible, or makes all chains take more than `max_seconds`.
    // next_need_ has the values after the change until the change is applied or dropped.
    bool weigh(Index g, Index kind, Index fetch, double max_seconds, Change& change) {
        const Index old_kind = kind_[g], old_fetch = fetch_[g], start = s_.start[g];
        change.gap = g, change.kind = kind, change.fetch = fetch, change.count = 0;
        if (old_kind == kRecomputed) {
            std::vector<Index>& targets = replacement(change, old_fetch).targets;
            targets.erase(std::find(targets.begin(), targets.end(), g));
        }
        if (kind == kRecomputed) replacement(change, fetch).targets.push_back(g);
        // The chains that depend on whether its content is resident.
        const Index was = old_kind == kRecomputed ? old_fetch : start, now = kind == kRecomputed ? fetch : start;
        for (const Index at : dependents_[g_.content[g]])
            if (std::min(was, now) <= at && at <= std::max(was, now) && at > start) replacement(change, at);
        // The chains that read it start or stop copying it in from home.
        if (old_kind == kOffloaded || kind == kOffloaded)
            for (const Index at : readers_[g_.content[g]])
                if (start < at && at <= g_.end[g]) replacement(change, at);
        std::sort(change.replacements.begin(), change.replacements.begin() + static_cast<std::ptrdiff_t>(change.count),
                  [](const Replacement& a, const Replacement& b) { return a.at < b.at; });
        change.seconds = seconds_;
        for (std::size_t i = 0; i < change.count; ++i) change.seconds -= chain_[change.replacements[i].at].seconds;
        kind_[g] = kind, fetch_[g] = fetch;
        bool is_possible = true;
        for (std::size_t i = 0; i < change.count && is_possible; ++i)
            is_possible = find_chain(change.replacements[i], max_seconds - change.seconds + 1e-12, change.seconds);
        kind_[g] = old_kind, fetch_[g] = old_fetch;
        if (is_possible) weigh_overload(change);
        return is_possible;
    }

    bool find_chain(Replacement& replacement, double max_seconds, double& seconds) {
        Chain& chain = replacement.chain;
        chain.seconds = 0.0, chain.need = g_.alone[replacement.at];
        chain.copying = 0.0;
        chain.seen.clear(), chain.reads.clear();
        if (replacement.targets.empty()) return true;
        contents_.clear();
        for (const Index g : replacement.targets) contents_.push_back(g_.content[g]);
        std::sort(contents_.begin(), contents_.end());
        contents_.erase(std::unique(contents_.begin(), contents_.end()), contents_.end());
        FoundChain result;
        const Index count = static_cast<Index>(contents_.size());
        const bool is_found =
            chains_.weigh(replacement.at, count, contents_.data(), max_seconds, kind_.data(), fetch_.data(), result);
        work_ += kChainWork * chains_.runs();
        if (!is_found) return false;
        runs_ += chains_.runs();
        chains_.for_each_seen([&](Index content) {
            if (is_tracked_[content]) chain.seen.push_back(content);
            if (!counts_overload_ && is_read(content)) chain.reads.push_back(content);
        });
        for (const Index content : chains_.from_home()) chain.copying += s_.home_seconds[content];
        chain.seconds = result.seconds;
        chain.need = std::max(chain.need, g_.before[replacement.at] - result.held + result.bytes);
        seconds += result.seconds;
        return true;
    }

    // Whether the last chain reads the content of a gap, which could be at home.
    bool is_read(Index content) const {
        return s_.gaps_from[content] < s_.gaps_from[content + 1] && !chains_.makes(content);
    }

    // The range of ops over which a change holds more, or fewer, bytes of its gap.
    struct Range {
        Index first, last, more;
    };
    Range range_of(const Change& change) const {
        const Index g = change.gap;
        const Index was = held_from(g, kind_[g], fetch_[g]), now = held_from(g, change.kind, change.fetch);
        return {std::min(was, now), std::max(was, now), now < was ? g_.bytes[g] : -g_.bytes[g]};
    }

    void weigh_overload(Change& change) {
        if (!counts_overload_) return;
        const auto [first, last, more] = range_of(change);
        change.penalty = penalty_, change.over_count = over_count_, change.added = 0;
        const auto look = [&](Index op, Index added) {
            const Index over = overload(held_[op] + added, next_need_[op]);
            if (over == over_[op]) return;
            change.over_count += (over > 0) - (over_[op] > 0);
            change.penalty += price_[op] * static_cast<double>(over - over_[op]);
            change.added += over - over_[op];
        };
        for (std::size_t i = 0; i < change.count; ++i) {
            const Replacement& replaced = change.replacements[i];
            next_need_[replaced.at] = replaced.chain.need;
            if (replaced.at < first || last <= replaced.at) look(replaced.at, 0);
        }
        for (Index op = first; op < last; ++op) look(op, more);
        work_ += kChangeWork + last - first;
    }

    void drop(const Change& change) {
        for (std::size_t i = 0; i < change.count; ++i)
            next_need_[change.replacements[i].at] = need_[change.replacements[i].at];
    }

    // Apply a change, and turn it into its inverse.
    void apply(Change& change) {
        const auto [first, last, more] = range_of(change);
        for (std::size_t i = 0; i < change.count; ++i) {
            Replacement& replaced = change.replacements[i];
            for (const Index content : chain_[replaced.at].seen) {
                std::vector<Index>& dependents = dependents_[content];
                *std::find(dependents.begin(), dependents.end(), replaced.at) = dependents.back();
                dependents.pop_back();
            }
            for (const Index content : replaced.chain.seen) dependents_[content].push_back(replaced.at);
            for (const Index content : chain_[replaced.at].reads) {
                std::vector<Index>& readers = readers_[content];
                *std::find(readers.begin(), readers.end(), replaced.at) = readers.back();
                readers.pop_back();
            }
            for (const Index content : replaced.chain.reads) readers_[content].push_back(replaced.at);
            std::swap(chain_[replaced.at], replaced.chain);
            std::swap(targets_[replaced.at], replaced.targets);
            need_[replaced.at] = next_need_[replaced.at] = chain_[replaced.at].need;
        }
        if (counts_overload_) {
            for (Index op = first; op < last; ++op) {
                held_[op] += more;
                over_[op] = overload(held_[op], need_[op]);
            }
            for (std::size_t i = 0; i < change.count; ++i) {
                const Index at = change.replacements[i].at;
                over_[at] = overload(held_[at], need_[at]);
            }
        }
        std::swap(kind_[change.gap], change.kind);
        std::swap(fetch_[change.gap], change.fetch);
        std::swap(seconds_, change.seconds);
        std::swap(penalty_, change.penalty);
        std::swap(over_count_, change.over_count);
        work_ += last - first;
    }

    // The work of an op of a chain, and of a change, in inspected ops.
    static constexpr Index kChainWork = 16, kChangeWork = 64;

    const Step s_;
    const Gaps g_;
    Chains chains_;
    std::vector<Index> kind_, fetch_;  // by gap
    const std::vector<Index> free_;
    std::vector<Index> held_, need_, next_need_, over_;      // by op
    std::vector<double> price_;                              // by op, seconds for a byte above the limit
    std::vector<Chain> chain_;                               // by op
    std::vector<std::vector<Index>> targets_;                // by op, the gaps that are fetched there
    std::vector<std::vector<Index>> dependents_;             // by content, the ops with chains that read or make it
    std::vector<std::vector<Index>> readers_;                // by content, the ops with chains that read it
    std::vector<char> is_tracked_;                           // by content, whether a gap of it may be recomputed
    bool counts_overload_ = true;                            // if false, the contents that chains read are recorded
    std::vector<Index> options_, early_fetches_, contents_, best_;
    Change changes_[2];
    Random random_{0};
    double unit_ = 0.0, usual_price_ = 0.0, seconds_ = 0.0, penalty_ = 0.0;
    Index limit_ = 0, need_limit_ = 0, min_overload_ = 0, min_part_ = 0, over_count_ = 0;
    Index work_ = 0, runs_ = 0, patience_ = 0;  // ops inspected by annealing, runs by the greedy search, and its limit
};

}  // namespace remat
