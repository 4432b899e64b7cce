// The chain of runs that makes some contents before an op; chains.py defines chains.
//
// tests/unit/naive_chains.py adds up the seconds of a chain in the same order, so results are equal to the last bit.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace remat {

using Index = std::int64_t;

// As in contents.py and chains.py.
constexpr Index kAtHome = 1, kResident = 0, kOffloaded = 1, kRecomputed = 2;

// A constant step: contents and ops by number. Lists of lists are concatenated; list i is [from[i], from[i + 1]).
struct Step {
    Index contents, ops;
    const Index *maker, *born, *gone, *lasting, *size, *storage;  // by content
    const Index *gaps_from, *gaps;                                // by content
    const Index *needs_from, *needs, *makes_from, *makes;         // by op
    const Index *fresh, *scratch, *workspace;                     // by op
    const double* seconds;                                        // by op
    const double* home_seconds;                                   // by content, of a copy in from the last home
    const Index* start;                                           // by gap
};

struct FoundChain {
    double seconds;
    Index bytes, held;
    Index ops, made, seen, home;  // the number of each in the list, in this order
    const Index* list;
};

// A set of small integers that is cleared in constant time.
class Marks {
public:
    explicit Marks(Index count) : round_(count, 0) {}
    void clear() { ++now_; }
    bool has(Index i) const { return round_[i] == now_; }
    void add(Index i) { round_[i] = now_; }
    void drop(Index i) { round_[i] = 0; }

private:
    std::vector<std::uint64_t> round_;
    std::uint64_t now_ = 1;
};

class Chains {
public:
    explicit Chains(const Step& step)
        : s_(step), target_(step.contents), met_(step.contents), home_(step.contents), block_(step.contents),
          made_(step.contents), running_(step.ops), last_(step.contents) {}

    // Find a chain: its seconds, bytes and target bytes; false if it is impossible or takes more than `limit` seconds.
    bool weigh(Index at, Index count, const Index* targets, double limit, const Index* kind, const Index* fetch,
               FoundChain& result) {
        if (!collect(at, count, targets, limit, kind, fetch, result.seconds)) return false;
        std::sort(runs_.begin(), runs_.end());
        std::sort(from_home_.begin(), from_home_.end());
        measure(result.bytes);
        result.held = 0;
        for (Index i = 0; i < count; ++i) result.held += s_.size[targets[i]];
        return true;
    }

    // Find a chain, and list its ops and contents.
    bool find(Index at, Index count, const Index* targets, double limit, const Index* kind, const Index* fetch,
              FoundChain& result) {
        if (!weigh(at, count, targets, limit, kind, fetch, result)) return false;
        list_.assign(runs_.begin(), runs_.end());
        list_.insert(list_.end(), makes_.begin(), makes_.end());
        const std::size_t before = list_.size();
        for_each_seen([this](Index content) { list_.push_back(content); });
        result.ops = static_cast<Index>(runs_.size());
        result.made = static_cast<Index>(makes_.size());
        result.seen = static_cast<Index>(list_.size() - before);
        result.home = static_cast<Index>(from_home_.size());
        list_.insert(list_.end(), from_home_.begin(), from_home_.end());
        result.list = list_.data();
        return true;
    }

    // The number of ops of the last chain found.
    Index runs() const { return static_cast<Index>(runs_.size()); }

    // Whether the last chain makes a content.
    bool makes(Index content) const { return made_.has(content); }

    // The contents that the last chain copies in.
    const std::vector<Index>& from_home() const { return from_home_; }

    // Visit the contents that the last chain reads or makes.
    template <typename Visit> void for_each_seen(const Visit& visit) const {
        for (const Index content : seen_)
            if (!made_.has(content)) visit(content);
        for (const Index content : makes_) visit(content);
    }

private:
    // Collect the ops that must run, and the contents that they copy in from home.
    bool collect(Index at, Index count, const Index* targets, double limit, const Index* kind, const Index* fetch,
                 double& seconds) {
        target_.clear(), met_.clear(), home_.clear(), running_.clear();
        runs_.clear(), from_home_.clear();
        seen_.assign(targets, targets + count);
        pending_.assign(targets, targets + count);
        for (const Index content : seen_) target_.add(content), met_.add(content);
        seconds = 0.0;
        while (!pending_.empty()) {
            const Index op = s_.maker[pending_.back()];
            pending_.pop_back();
            if (op < 0) return false;
            if (running_.has(op)) continue;
            running_.add(op);
            runs_.push_back(op);
            seconds += s_.seconds[op];
            if (seconds > limit) return false;
            for (Index i = s_.needs_from[op]; i < s_.needs_from[op + 1]; ++i) {
                const Index need = s_.needs[i];
                if (met_.has(need)) continue;
                met_.add(need);
                seen_.push_back(need);
                const bool is_held = s_.born[need] < at && at <= s_.gone[need];
                if (s_.lasting[need]) {
                    if (s_.lasting[need] == kAtHome && (!is_held || !is_there(need, at, kind, fetch)))
                        comes_from_home(need);
                    continue;
                }
                if (is_held && is_there(need, at, kind, fetch)) continue;
                pending_.push_back(need);
            }
        }
        return true;
    }

    // Whether a content that is alive before an op is resident then, or can be copied in from home.
    bool is_there(Index content, Index at, const Index* kind, const Index* fetch) {
        bool is_resident = true;
        for (Index i = s_.gaps_from[content]; i < s_.gaps_from[content + 1]; ++i) {
            const Index gap = s_.gaps[i];
            const bool is_open = s_.start[gap] < at && at < fetch[gap];
            if (is_open && kind[gap] == kRecomputed) is_resident = false;
            if (is_open && kind[gap] == kOffloaded) comes_from_home(content);
        }
        return is_resident;
    }

    void comes_from_home(Index content) {
        if (home_.has(content)) return;
        home_.add(content);
        from_home_.push_back(content);
    }

    // Measure the most bytes that the runs hold at once.
    void measure(Index& max_bytes) {
        for (const Index op : runs_)
            for (Index i = s_.needs_from[op]; i < s_.needs_from[op + 1]; ++i) last_[s_.needs[i]] = op;
        block_.clear(), made_.clear();
        makes_.clear();
        Index used = 0;
        max_bytes = 0;
        for (const Index op : runs_) {
            const Index *needs = s_.needs + s_.needs_from[op], *needs_end = s_.needs + s_.needs_from[op + 1];
            const Index *makes = s_.makes + s_.makes_from[op], *makes_end = s_.makes + s_.makes_from[op + 1];
            for (const Index* need = needs; need != needs_end; ++need)
                if (home_.has(*need) && !block_.has(*need)) {
                    block_.add(*need);
                    used += s_.size[*need];
                }
            used += s_.fresh[op];
            max_bytes = std::max(max_bytes, used + s_.workspace[op]);
            used -= s_.scratch[op];
            for (const Index* need = needs; need != needs_end; ++need) {
                if (!block_.has(*need)) continue;
                const auto is_same = [&](Index made) { return s_.storage[made] == s_.storage[*need]; };
                if (std::any_of(makes, makes_end, is_same)) {
                    block_.drop(*need);  // written in place: its block becomes the new content's
                } else if (last_[*need] == op && !target_.has(*need)) {
                    block_.drop(*need);
                    used -= s_.size[*need];
                }
            }
            for (const Index* made = makes; made != makes_end; ++made) {
                if (!made_.has(*made)) {
                    made_.add(*made);
                    makes_.push_back(*made);
                }
                // last_ is stale for contents that no run reads; these are in met_ only if they are targets.
                if (target_.has(*made) || (met_.has(*made) && last_[*made] > op))
                    block_.add(*made);
                else
                    used -= s_.size[*made];
            }
        }
    }

    const Step s_;
    Marks target_, met_, home_, block_, made_, running_;
    std::vector<Index> last_, runs_, from_home_, seen_, makes_, pending_, list_;
};

}  // namespace remat
