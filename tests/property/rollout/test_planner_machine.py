"""Whatever happens, whenever the operator dies: floors and budgets hold, and the cluster comes to rest."""

import re
from collections import Counter
from dataclasses import replace
from itertools import count

from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from mooncake_core.api.coordination import PoolRatio
from mooncake_core.registry import InstanceState, Role
from mooncake_operator.planning import reasons
from mooncake_operator.planning.actions import CreatePod, DeletePod, SetGate
from mooncake_operator.planning.desired import DesiredCluster, DesiredPool
from mooncake_operator.planning.instances import Phase, assemble, is_lost, is_own
from mooncake_operator.planning.observed import (
    Gate,
    Observed,
    ObservedPod,
    PoolHistory,
    Registration,
    Trouble,
)
from mooncake_operator.planning.plan import plan
from mooncake_operator.planning.preview import carry_out, settle

ROUNDS_TO_REST = 400
DRAIN_S = 120
POOLS = st.sampled_from(["p", "d"])


def rest(cluster, observed, rounds=ROUNDS_TO_REST):
    """Let everything go well until nothing is left to do."""
    for _ in range(rounds):
        made = plan(cluster, observed)
        after = settle(carry_out(cluster, observed, made))
        phases = {i.phase for pool in cluster.pools for i in assemble(pool, observed)}
        if not made.actions and phases <= {Phase.ROUTABLE, Phase.LOST}:
            return observed
        observed = after
    raise AssertionError(f"no rest: {made.actions} {made.waits}")


class Planner(RuleBasedStateMachine):
    @initialize(
        prefill=st.integers(1, 5),
        decode=st.integers(1, 5),
        size=st.integers(1, 4),
        surge=st.integers(0, 2),
        unavailable=st.integers(1, 2),
        skew=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
        spare=st.sampled_from([None, 0, 1, 3]),
        least=st.integers(0, 3),
        ratio=st.sampled_from([None, ("1", "1")]),
        work=st.integers(0, 2),
    )
    def begin(self, prefill, decode, size, surge, unavailable, skew, spare, least, ratio, work):
        self.edits = count(1)
        self.serial = count()
        self.meddled = set()
        self.protected = set()
        self.spare = spare
        self.size = size
        # Where no instance may come first, a floor as high as the pool would let nothing be replaced, ever.
        least = least if surge and spare is None else 0

        def pool(name, role, replicas):
            return DesiredPool(
                name,
                f"uid-{name}",
                role,
                replicas,
                "r0",
                pairing="g0",
                size=size,
                gpus_per_pod=1,
                max_surge=surge,
                max_unavailable=unavailable,
                min_available=least,
                drain_timeout_s=DRAIN_S,
            )

        pools = (pool("p", Role.PREFILL, prefill), pool("d", Role.DECODE, decode))
        self.owners = {pool.uid for pool in pools}
        bounds = ratio and PoolRatio(min_prefill_per_decode=ratio[0], max_prefill_per_decode=ratio[1])
        self.cluster = DesiredCluster(pools, max_skew=skew, ratio=bounds)
        self.fit_budget()
        self.observed = Observed(1000.0, registry={})
        self.observed = rest(self.cluster, self.observed)
        registry = self.observed.registry
        busy = {name: replace(known, in_flight=work) for name, known in registry.items()}
        self.observed = replace(self.observed, registry=busy)
        self.desired_before = self.cluster
        self.another_operator_takes_its_picture()

    # What the user does.

    def change(self, name, **fields):
        pools = tuple(replace(p, **fields) if p.name == name else p for p in self.cluster.pools)
        self.cluster = replace(self.cluster, pools=pools)
        self.fit_budget()

    def fit_budget(self):
        """A budget below the wanted pools is refused by the API.

        Where instances of another size must go first, floors and budget can contradict each other (one old
        instance of two GPUs, to become two new ones of one each). So there is room at either size.
        """
        if self.spare is not None:
            self.size = max(self.size, *(pool.size for pool in self.cluster.pools))
            wanted = sum(pool.replicas * self.size * pool.gpus_per_pod for pool in self.cluster.pools)
            budget = max(wanted + self.spare, self.cluster.gpu_budget or 0)
            self.cluster = replace(self.cluster, gpu_budget=budget)

    @rule(name=POOLS, replicas=st.integers(1, 5))
    def user_scales(self, name, replicas):
        self.change(name, replicas=replicas)

    @rule()
    def user_edits_what_both_sides_share(self):
        self.desired_before = self.cluster
        number = next(self.edits)
        for pool in self.cluster.pools:
            self.change(pool.name, revision=f"r{number}", pairing=f"g{number}")

    @rule(name=POOLS)
    def user_edits_one_pool(self, name):
        self.desired_before = self.cluster
        self.change(name, revision=f"{self.cluster.pool(name).pairing}-{next(self.edits)}")

    @rule(name=POOLS, size=st.integers(1, 4))
    def user_changes_how_many_pods_an_instance_has(self, name, size):
        self.desired_before = self.cluster
        self.change(name, size=size, revision=f"{self.cluster.pool(name).pairing}-{next(self.edits)}")

    @rule()
    def user_undoes(self):
        for pool in self.desired_before.pools:
            self.change(pool.name, revision=pool.revision, pairing=pool.pairing, size=pool.size)

    @rule(name=POOLS, paused=st.booleans())
    def user_pauses(self, name, paused):
        self.change(name, paused=paused)

    @rule(name=POOLS, partition=st.integers(0, 3))
    def user_sets_partition(self, name, partition):
        self.change(name, partition=partition)

    @rule(data=st.data())
    def user_drains_an_instance(self, data):
        self.with_registration(data, state=InstanceState.DRAINING)

    # What the world does.

    def own_pods(self):
        return [pod for pod in self.observed.pods if pod.owner_uid in self.owners]

    def pick(self, data, *kinds):
        pods = [pod for pod in self.own_pods() if all(kind(pod) for kind in kinds)]
        assume(pods)
        return data.draw(st.sampled_from(sorted(pods, key=lambda pod: pod.name)))

    def meddle(self, uid, **fields):
        """Somebody else's hand: that the operator had chosen this Pod to go may not be told from it now."""
        self.meddle_with(next(pod.instance for pod in self.own_pods() if pod.uid == uid))
        self.put(uid, **fields)

    def meddle_with(self, instance):
        """The other Pods of an instance follow the one that somebody ended."""
        self.meddled |= {pod.uid for pod in self.own_pods() if pod.instance == instance}

    def put(self, uid, **fields):
        pods = tuple(replace(p, **fields) if p.uid == uid else p for p in self.observed.pods)
        self.observed = replace(self.observed, pods=pods)

    def with_registration(self, data, **fields):
        assume(self.observed.registry)
        name = data.draw(st.sampled_from(sorted(self.observed.registry)))
        registry = self.observed.registry
        self.observed = replace(self.observed, registry={**registry, name: replace(registry[name], **fields)})

    def forget(self, *instances):
        if self.observed.registry is not None:
            left = {k: v for k, v in self.observed.registry.items() if k not in instances}
            self.observed = replace(self.observed, registry=left)

    @rule(data=st.data())
    def pod_becomes_ready(self, data):
        pod = self.pick(data, lambda p: p.deleted_s is None and p.phase in ("Pending", "Running"))
        self.put(
            pod.uid,
            phase="Running",
            containers_ready=True,
            containers_ended=False,
            node=f"node-{hash(pod.uid) % 3}",
        )
        peers = [p for p in self.own_pods() if p.instance == pod.instance]
        if self.observed.registry is not None and all(p.containers_ready for p in peers):
            registry = {**self.observed.registry}
            registry.setdefault(pod.instance, Registration(InstanceState.READY))
            self.observed = replace(self.observed, registry=registry)

    @rule(data=st.data(), evicted=st.booleans())
    def pod_fails(self, data, evicted):
        pod = self.pick(data, lambda p: p.deleted_s is None)
        ending = Trouble("Evicted" if evicted else "Error", "exit code 1")
        self.put(pod.uid, phase="Failed", containers_ready=False, ending=ending)
        self.forget(pod.instance)

    @rule(data=st.data())
    def engine_restarts(self, data):
        pod = self.pick(data, lambda p: p.deleted_s is None and p.phase == "Running")
        restarts = pod.engine_restarts + 1
        self.put(pod.uid, engine_restarts=restarts, containers_ready=False, containers_ended=True)

    @rule(data=st.data())
    def pod_is_unready_for_a_while(self, data):
        pod = self.pick(data, lambda p: p.containers_ready)
        self.put(pod.uid, containers_ready=False)

    @rule(data=st.data())
    def somebody_deletes_a_pod(self, data):
        pod = self.pick(data, lambda p: p.deleted_s is None)
        self.meddle(pod.uid, deleted_s=self.observed.now_s + DRAIN_S + 30)

    @rule(data=st.data(), seconds=st.sampled_from([0, 31]))
    def pod_finds_no_node(self, data, seconds):
        pod = self.pick(data, lambda p: p.deleted_s is None and p.phase == "Pending" and not p.node)
        since_s = self.observed.now_s - seconds
        self.put(pod.uid, trouble=Trouble("Unschedulable", "0/3 nodes are available", since_s))

    @rule(data=st.data())
    def a_policy_forbids_to_delete_a_pod(self, data):
        self.protected.add(self.pick(data, lambda p: p.deleted_s is None).uid)

    @precondition(lambda self: self.protected)
    @rule()
    def the_policy_is_lifted(self):
        self.protected.clear()

    @rule(data=st.data())
    def terminating_pod_is_gone(self, data):
        pod = self.pick(data, lambda p: p.deleted_s is not None)
        self.observed = replace(self.observed, pods=tuple(p for p in self.observed.pods if p.uid != pod.uid))
        self.forget(pod.instance)

    @rule(node=st.integers(0, 2))
    def node_goes(self, node):
        for pod in self.own_pods():
            if pod.node == f"node-{node}" and pod.deleted_s is None:
                self.meddle(pod.uid, containers_ready=False, deleted_s=self.observed.now_s)

    @rule(name=POOLS, ordinal=st.integers(0, 7), rank=st.integers(0, 3), labelled=st.booleans())
    def foreign_pod_takes_a_name(self, name, ordinal, rank, labelled):
        pool = self.cluster.pool(name)
        pod = pool.pod(pool.instance(ordinal), rank)
        assume(all(other.name != pod for other in self.observed.pods))
        foreign = ObservedPod(
            pod, f"foreign-{next(self.serial)}", "", name if labelled else "", pod, phase="Running"
        )
        self.observed = replace(self.observed, pods=(*self.observed.pods, foreign))

    # What others write who think that they know better.

    @rule(data=st.data(), status=st.booleans(), reason=st.sampled_from([reasons.REGISTERED, "ByHand"]))
    def somebody_writes_the_gate(self, data, status, reason):
        pod = self.pick(data, lambda p: p.rank == 0)
        self.meddle(pod.uid, gate=Gate(status, reason, self.observed.now_s))

    @rule(data=st.data(), fields=st.sampled_from([{"revision": "unknown"}, {"pairing": "unknown"}]))
    def somebody_relabels_a_pod(self, data, fields):
        self.put(self.pick(data).uid, **fields)

    @rule(data=st.data())
    def somebody_takes_a_pod_from_its_pool(self, data):
        pod = self.pick(data)
        self.meddle_with(pod.instance)
        self.put(pod.uid, owner_uid=data.draw(st.sampled_from(["", "uid-of-another"])))
        if pod.rank == 0:
            self.forget(pod.instance)

    @rule(name=POOLS)
    def somebody_clears_a_status(self, name):
        # Those that failed and end are on record there alone.
        for pod in self.own_pods():
            if pod.pool == name and pod.deleted_s is not None:
                self.meddle_with(pod.instance)
        self.observed = replace(self.observed, histories={**self.observed.histories, name: PoolHistory()})

    @rule(data=st.data())
    def somebody_deletes_a_revision(self, data):
        assume(self.observed.revisions)
        gone = data.draw(st.sampled_from(sorted(self.observed.revisions, key=lambda r: (r.pool, r.name))))
        left = tuple(r for r in self.observed.revisions if r is not gone)
        self.observed = replace(self.observed, revisions=left)

    @rule()
    def another_operator_takes_its_picture(self):
        self.old = (self.cluster, plan(self.cluster, self.observed))

    @rule(survives=st.integers(0, 6))
    def another_operator_acts_on_its_old_picture(self, survives):
        """One that was frozen, say; uids and names keep it from what is no longer what it saw."""
        cluster, made = self.old
        made = replace(made, outcomes={}, actions=made.actions[:survives])
        made = replace(made, actions=self.allowed(made))
        self.observed = carry_out(cluster, self.observed, made)

    # What the world does, in between.

    @rule(data=st.data(), in_flight=st.integers(0, 5))
    def work_comes_and_goes(self, data, in_flight):
        self.with_registration(data, in_flight=in_flight)

    @precondition(lambda self: self.observed.registry is not None)
    @rule(forgets=st.booleans())
    def registry_goes_away_or_forgets(self, forgets):
        self.observed = replace(self.observed, registry={} if forgets else None)

    @rule()
    def registry_is_back(self):
        ready = {p.instance for p in self.own_pods() if p.rank == 0 and p.containers_ready}
        known = self.observed.registry or {}
        registry = {name: known.get(name, Registration(InstanceState.READY)) for name in sorted(ready)}
        self.observed = replace(self.observed, registry=registry)

    @rule(seconds=st.sampled_from([1, 29, 31, 121, 700]))
    def time_passes(self, seconds):
        self.observed = replace(self.observed, now_s=self.observed.now_s + seconds)

    @rule(seconds=st.sampled_from([2, 40, 700]))
    def the_clock_is_put_back(self, seconds):
        """Or another operator takes over, whose clock is behind."""
        self.observed = replace(self.observed, now_s=self.observed.now_s - seconds)

    # What the operator does.

    @rule()
    def operator_plans(self):
        self.carry_out(None)

    @rule(survives=st.integers(0, 6))
    def operator_dies_in_the_middle(self, survives):
        self.carry_out(survives)

    @rule(p=st.integers(0, 6), d=st.integers(0, 6))
    def operator_dies_while_its_pools_are_at_different_actions(self, p, d):
        self.carry_out({"p": p, "d": d})

    @rule()
    def all_goes_well_for_a_while(self):
        self.carry_out(None)
        self.observed = settle(self.observed)

    def carry_out(self, survives):
        made = plan(self.cluster, self.observed)
        assert plan(self.cluster, self.observed) == made
        self.judge(made)
        if isinstance(survives, dict):
            lanes = {name: [a for a in made.actions if self.pool_of(a) == name] for name in survives}
            made = replace(made, actions=[a for name, n in survives.items() for a in lanes[name][:n]])
        elif survives is not None:
            made = replace(made, actions=made.actions[:survives])
        self.observed = carry_out(self.cluster, self.observed, replace(made, actions=self.allowed(made)))

    def allowed(self, made):
        """What the API server takes; after a refusal nothing more is done to that instance."""
        stopped, done = set(), []
        for action in made.actions:
            instance = getattr(action, "instance", None) or getattr(action, "pod", None)
            if isinstance(action, DeletePod) and action.uid in self.protected:
                stopped.add(instance)
            if isinstance(action, CreatePod) or instance not in stopped:
                done.append(action)
        return done

    def pool_of(self, action):
        """Pools are carried out side by side, each in its order."""
        if hasattr(action, "pool"):
            return action.pool
        instance = action.pod if isinstance(action, SetGate) else action.instance
        return next(pool.name for pool in self.cluster.pools if pool.ordinal(instance) is not None)

    def judge(self, made):
        """No plan makes anything worse than its bounds allow."""
        pods = {pod.uid: pod for pod in self.observed.pods}
        names = {pod.name for pod in self.observed.pods}
        for action in made.actions:
            if isinstance(action, DeletePod):
                assert pods[action.uid].owner_uid in self.owners, "a foreign Pod was deleted"
                if action.reason == reasons.INSTANCE_FAILED:
                    assert self.on_record(pods[action.uid]), "the reason is lost with the Pod"
            if isinstance(action, CreatePod):
                assert action.pod not in names, "a name that is taken"
                names.add(action.pod)
        self.judge_wholeness(made)
        self.judge_gpus(made)
        for pool in self.cluster.pools:
            self.judge_floor(pool, made)
            self.judge_size(pool, made)
            self.judge_skew(pool, made)
            self.judge_pace(pool, made)
            self.judge_drains(pool, made)
        self.judge_partners(made)
        self.judge_shares(made)
        self.judge_ratio(made)

    def judge_wholeness(self, made):
        """The Pods of an instance go together, and a worker is made for a leader that is there and stays."""
        going = {action.uid for action in made.actions if isinstance(action, DeletePod)}
        of_instances = {a.instance for a in made.actions if isinstance(a, DeletePod)}
        for pod in self.own_pods():
            if pod.instance in of_instances and pod.deleted_s is None:
                assert pod.uid in going, "half an instance is left"
        present = {pod.uid: pod for pod in self.own_pods()}
        for action in made.actions:
            if isinstance(action, CreatePod) and action.rank:
                leader = present[action.leader_uid]
                assert (leader.instance, leader.rank, leader.deleted_s) == (action.instance, 0, None)
                assert leader.uid not in going
                assert (leader.revision, action.rank < leader.size) == (action.revision, True)

    def on_record(self, pod):
        records = self.observed.history(pod.pool).recreations
        return any(record.instance == pod.instance for record in records)

    def judge_gpus(self, made):
        if self.cluster.gpu_budget is None:
            return
        used = sum(
            pod.gpus
            for pod in self.own_pods()
            if not is_lost(pod, self.observed.now_s) or self.partly_there(pod)
        )
        made_now = sum(1 for action in made.actions if isinstance(action, CreatePod))
        # Foreign deaths may leave more in use than the budget; then nothing may be added.
        assert not made_now or used + made_now <= max(self.cluster.gpu_budget, used_by_workers(made, used))

    def partly_there(self, pod):
        peers = [p for p in self.own_pods() if p.instance == pod.instance]
        return not all(is_lost(p, self.observed.now_s) for p in peers)

    def chosen(self, made, pool):
        """Routable instances that a plan takes away."""
        gone = {a.pod for a in made.actions if isinstance(a, SetGate) and a.reason == reasons.DRAINING}
        gone |= {a.instance for a in made.actions if isinstance(a, DeletePod)}
        return [i for i in assemble(pool, self.observed) if i.routable and i.name in gone]

    def judge_floor(self, pool, made):
        before = sum(i.routable for i in assemble(pool, self.observed))
        after = before - len(self.chosen(made, pool))
        assert after >= min(before, pool.replicas - pool.max_unavailable)

    def replaced(self, made, pool):
        """Instances that a plan takes away for the sake of a newer revision."""
        gone = {
            a.pod
            for a in made.actions
            if isinstance(a, SetGate)
            and a.reason == reasons.DRAINING
            and a.message.startswith(reasons.REPLACED)
        }
        gone |= {
            a.instance for a in made.actions if isinstance(a, DeletePod) and a.reason == reasons.REPLACED
        }
        return [i for i in assemble(pool, self.observed) if i.name in gone]

    def judge_pace(self, pool, made):
        """A pause and a partition are kept, and where new ones may come first, nobody is missed."""
        replaced = self.replaced(made, pool)
        assert not (pool.paused and replaced)
        assert not any(i.updated for i in replaced)
        if replaced:
            old = [i for i in self.remaining(pool, made) if not i.updated]
            kept = {a.pod for a in made.actions if isinstance(a, SetGate) and a.reason != reasons.DRAINING}
            recalled = [
                i for i in assemble(pool, self.observed) if i.phase is Phase.DRAINING and i.name in kept
            ]
            made_old = [
                a
                for a in made.actions
                if isinstance(a, CreatePod)
                and a.pool == pool.name
                and not a.rank
                and a.revision != pool.revision
            ]
            assert len(old) + len(recalled) + len(made_old) >= pool.partition
            # The Deployments' bound: a new revision that does not work cannot eat up the old one.
            working = sum(i.updated and i.routable for i in self.remaining(pool, made))
            sound = len(old) + len(recalled) + len(made_old) + working
            assert sound >= pool.replicas - pool.max_unavailable
        if any(i.routable for i in replaced):
            left = sum(i.routable for i in assemble(pool, self.observed)) - len(self.chosen(made, pool))
            assert left >= min(pool.min_available, pool.replicas)
            crowded = self.spare is not None or any(pod.trouble for pod in self.own_pods())
            assert not pool.max_surge or crowded or left >= pool.replicas

    def judge_drains(self, pool, made):
        """Work in flight is cut only when its time is over."""
        for action in made.actions:
            if not isinstance(action, DeletePod) or action.reason != reasons.DRAINING:
                continue
            (pod,) = (p for p in self.observed.pods if p.uid == action.uid)
            if pod.pool != pool.name:
                continue
            leader = next(p for p in self.own_pods() if p.name == action.instance)
            if self.observed.now_s < leader.gate.since_s + pool.drain_timeout_s:
                assert self.observed.registry is not None
                known = self.observed.registry.get(action.instance)
                assert known is None or (known.state is InstanceState.DRAINING and not known.in_flight)

    def judge_shares(self, made):
        """What a rollout takes leaves no pool behind the fullest by more than the skew, or one instance."""
        after = {
            pool.name: sum(i.routable for i in assemble(pool, self.observed)) - len(self.chosen(made, pool))
            for pool in self.cluster.pools
        }
        shares = {pool.name: min(after[pool.name] / pool.replicas, 1.0) for pool in self.cluster.pools}
        for pool in self.cluster.pools:
            if any(i.routable for i in self.replaced(made, pool)):
                bound = max(self.cluster.max_skew, 1 / pool.replicas)
                assert max(shares.values()) - shares[pool.name] <= bound + 1e-9

    def judge_ratio(self, made):
        """A rollout keeps prefill and decode in their ratio, give or take one, while there is another way."""
        instances = [i for pool in self.cluster.pools for i in assemble(pool, self.observed)]
        replaced = [i for pool in self.cluster.pools for i in self.replaced(made, pool) if i.routable]
        ratio, (wanted_p, wanted_d) = self.cluster.ratio, (pool.replicas for pool in self.cluster.pools)
        if ratio is None or not ratio.allows(wanted_p, wanted_d) or not replaced:
            return
        if not any(i.phase not in (Phase.ROUTABLE, Phase.LOST) for i in instances):
            return
        gone = {i.name for pool in self.cluster.pools for i in self.chosen(made, pool)}
        p, d = (
            sum(i.routable and i.name not in gone for i in instances if i.pool is pool)
            for pool in self.cluster.pools
        )
        assert ratio.allows(p, d) or ratio.allows(p + 1, d) or ratio.allows(p, d + 1)

    def judge_size(self, pool, made):
        created = [a for a in made.actions if isinstance(a, CreatePod) and a.pool == pool.name and not a.rank]
        records = {record.instance for record in self.observed.history(pool.name).recreations}
        fresh = [a for a in created if a.instance not in records]
        instances = assemble(pool, self.observed)
        kept = {record.instance for record in made.outcomes[pool.name].recreations}
        present = sum(i.live and (i.phase is not Phase.ABSENT or i.name in kept) for i in instances)
        outgoing = sum(self.goes_by_choice(i) for i in instances)
        if fresh:
            assert present + outgoing + len(fresh) <= pool.replicas + pool.max_surge
        by_revision = Counter(a.revision for a in fresh)
        assert by_revision.total() == 0 or max(by_revision.values()) <= pool.replicas + pool.max_surge

    def goes_by_choice(self, instance):
        """Whether it holds its place until it is gone, of whichever revision it is: nobody else ended it."""
        if instance.phase not in (Phase.DRAINING, Phase.ENDING):
            return False
        return self.meddled.isdisjoint(pod.uid for pod in instance.pods)

    def judge_skew(self, pool, made):
        """Nobody is updated further ahead of the slowest than the bound, or by one instance."""
        (other,) = (p for p in self.cluster.pools if p is not pool)
        ahead = [
            a
            for a in made.actions
            if isinstance(a, CreatePod) and a.pool == pool.name and not a.rank and a.revision == pool.revision
        ]
        again = {record.instance for record in self.observed.history(pool.name).recreations}
        ahead = [a for a in ahead if a.instance not in again]
        left, slowest = self.remaining(pool, made), self.remaining(other, made)
        if not ahead or len(left) < pool.replicas or not pool.updated_target:
            return
        updated = sum(i.updated for i in left) + len(ahead)
        progress = 1.0
        if sum(not i.updated for i in slowest) > other.partition and other.updated_target:
            progress = sum(i.updated and i.routable for i in slowest) / other.updated_target
        bound = max(self.cluster.max_skew, 1 / pool.updated_target)
        assert updated / pool.updated_target - min(progress, 1.0) <= bound + 1e-9

    def remaining(self, pool, made):
        """Live instances that a plan leaves."""
        gone = {a.pod for a in made.actions if isinstance(a, SetGate) and a.reason == reasons.DRAINING}
        gone |= {
            a.instance
            for a in made.actions
            if isinstance(a, DeletePod) and a.reason in (reasons.REPLACED, reasons.SCALED_DOWN)
        }
        kept = {record.instance for record in made.outcomes[pool.name].recreations}
        return [
            i
            for i in assemble(pool, self.observed)
            if i.live and i.name not in gone and (i.phase is not Phase.ABSENT or i.name in kept)
        ]

    def judge_partners(self, made):
        """Nobody whom schedulers use is left alone by choice, while there is another way."""
        instances = [i for pool in self.cluster.pools for i in assemble(pool, self.observed)]
        if not any(i.phase not in (Phase.ROUTABLE, Phase.LOST) for i in instances):
            return
        gone = {i.name for pool in self.cluster.pools for i in self.chosen(made, pool)}
        before = usable([i for i in instances if i.routable])
        after = usable([i for i in instances if i.routable and i.name not in gone])
        for pool in self.cluster.pools:
            floor = pool.replicas - pool.max_unavailable
            shrinking = sum(i.live for i in instances if i.pool is pool) > pool.replicas + pool.max_surge
            assert shrinking or after[pool.name] >= min(before[pool.name], floor)

    def teardown(self):
        if not hasattr(self, "observed"):
            return
        for pool in self.cluster.pools:
            self.change(pool.name, paused=False)
        self.protected.clear()
        undrained = {
            name: replace(r, state=InstanceState.READY, in_flight=0)
            for name, r in (self.observed.registry or {}).items()
        }
        self.observed = replace(self.observed, registry=undrained)
        observed = self.with_room(rest(self.cluster, self.observed))
        for pool in self.cluster.pools:
            instances = [i for i in assemble(pool, observed) if i.live]
            assert sum(i.routable for i in instances) == len(instances) == pool.replicas
            assert sum(i.updated for i in instances) >= pool.updated_target
            assert all(len(i.pods) == i.size for i in instances)
            assert all(i.size == pool.size for i in instances if i.updated)
            for instance in instances:
                assert [pod.rank for pod in instance.pods] == list(range(instance.size))
                assert {pod.leader_uid for pod in instance.pods[1:]} <= {instance.pods[0].uid}
        kept = {pod.uid for pod in observed.pods if pod.deleted_s is None}
        foreign = [pod for pod in self.observed.pods if pod.owner_uid not in self.owners]
        assert {pod.uid for pod in foreign if pod.deleted_s is None} <= kept, "a foreign Pod is gone"
        assert not plan(self.cluster, observed).actions

    def with_room(self, observed):
        """Larger old instances may fill the budget while more and smaller new ones are wanted.

        To let them go would break the floor: the plan says what to raise, and goes on once that is done.
        """
        while not self.whole(observed):
            live = [i for pool in self.cluster.pools for i in assemble(pool, observed) if i.live]
            assert any(i.gpus > i.pool.gpus for i in live)
            stuck = [o.stuck for o in plan(self.cluster, observed).outcomes.values() if o.stuck is not None]
            assert stuck, "it stands still, and nothing says why"
            named = max(int(re.search(r"set coordination.gpuBudget to (\d+)", s.message)[1]) for s in stuck)
            assert named > self.cluster.gpu_budget
            self.cluster = replace(self.cluster, gpu_budget=named)
            observed = rest(self.cluster, observed)
        return observed

    def whole(self, observed):
        counts = {
            pool: sum(i.live for i in assemble(pool, observed)) == pool.replicas
            for pool in self.cluster.pools
        }
        return all(counts.values())


def used_by_workers(made, used):
    """Workers of an instance that has begun are made even where others took more than the budget."""
    return used + sum(1 for a in made.actions if isinstance(a, CreatePod) and a.rank > 0)


def usable(instances):
    by_role = {}
    for instance in instances:
        by_role.setdefault(instance.pool.role, set()).add(instance.pairing)
    both = by_role.get(Role.PREFILL, set()) & by_role.get(Role.DECODE, set())
    return Counter(i.pool.name for i in instances if i.pairing in both)


TestPlanner = Planner.TestCase
TestPlanner.settings = settings(
    max_examples=max(150, settings.default.max_examples),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_own_pods_are_told_by_the_owner_alone():
    pool = DesiredPool("p", "uid-p", Role.PREFILL, 1, "r")
    assert not is_own(pool, ObservedPod("p-p-0", "x", "", "p", "p-p-0"))
    assert not is_own(pool, ObservedPod("p-p-0", "x", "uid-of-an-earlier-pool", "p", "p-p-0"))
    assert is_own(pool, ObservedPod("p-p-0", "x", "uid-p", "p", "p-p-0"))


def test_ranks_whose_revision_somebody_has_deleted_hold_nothing_up_for_ever():
    def wanted(revision):
        pool = DesiredPool("d", "uid-d", Role.DECODE, 1, revision, pairing="g", size=2, max_surge=0)
        return DesiredCluster((pool,))

    observed = rest(wanted("r0"), Observed(1000.0, registry={}))
    leader, worker = observed.pods
    starting = replace(leader, gate=None, containers_ready=False, phase="Pending")
    kept = tuple(revision for revision in observed.revisions if revision.name != "r0")
    # Paused, so that no rollout takes it away: the rank is really wanted.
    (pool,) = wanted("r1").pools
    paused = DesiredCluster((replace(pool, paused=True),))
    torn = replace(observed, pods=(starting,), revisions=kept, registry={})
    settled = rest(paused, torn)
    assert {pod.revision for pod in settled.pods} == {"r1"}
    assert len(settled.pods) == 2
    assert worker.uid not in {pod.uid for pod in settled.pods}


def test_a_group_whose_leader_ends_first_keeps_its_failure_on_record_and_its_place():
    pool = DesiredPool("d", "uid-d", Role.DECODE, 1, "r0", pairing="g", size=2, max_surge=0)
    cluster = DesiredCluster((pool,))
    observed = rest(cluster, Observed(1000.0, registry={}))
    leader, worker = observed.pods
    restarted = replace(worker, engine_restarts=1, containers_ready=False, containers_ended=True)
    observed = replace(observed, pods=(leader, restarted))
    for _ in range(9):
        if any(pod.deleted_s is not None for pod in observed.pods):
            break
        observed = carry_out(cluster, observed, plan(cluster, observed))
    assert all(pod.deleted_s is not None for pod in observed.pods)
    alone = replace(observed, pods=tuple(pod for pod in observed.pods if pod.rank))
    made = plan(cluster, alone)
    assert not made.actions, "another comes while it still ends"
    assert [(record.instance, record.failures) for record in made.outcomes["d"].recreations] == [("d-d-0", 1)]


def test_a_group_chosen_to_go_holds_its_place_when_its_leader_ends_first():
    pool = DesiredPool("d", "uid-d", Role.DECODE, 1, "r0", pairing="g", size=2, max_surge=0)
    observed = rest(DesiredCluster((pool,)), Observed(1000.0, registry={}))
    newer = DesiredCluster((replace(pool, revision="r1"),))
    for _ in range(9):
        if any(pod.deleted_s is not None for pod in observed.pods):
            break
        observed = settle(carry_out(newer, observed, plan(newer, observed)))
    ending = replace(observed.pods[1], deleted_s=observed.now_s + 150)
    assert not plan(newer, replace(observed, pods=(ending,))).actions
