"""Backward in the lanes: the gradients are those of a backward in the calling thread, whoever asks and whoever looks."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from parawrap.engine._backward import LaneBackward
from parawrap.lanes import LanePool, current_lane, first_failure
from parawrap.replicas import ReplicaSet
from parawrap.shards import Cutter, GatherRules, gather
from parawrap.tree import flatten

CPU = torch.device("cpu")
DEADLINE_S = 60


class Lanes:
    """The four verbs on lanes of the CPU; `regrown` tells for each call whether its backward is the lanes' own."""

    def __init__(self, target, lanes=2, *, as_ever=False) -> None:
        self.target = target
        self.devices = [CPU] * lanes
        self.pool = LanePool(self.devices)
        self.as_ever = as_ever
        self.regrown = []
        self.replicas = ReplicaSet(target, self.devices) if isinstance(target, nn.Module) else None

    def apply(self, works):
        outcomes = self.pool.run(works)
        error = first_failure(outcomes, self.pool.lanes)
        if error is not None:
            try:
                raise error
            finally:
                del error
                outcomes.clear()
        return [outcome.value for outcome in outcomes]

    def ways(self):
        if self.replicas is None:
            return [self.target] * len(self.devices)
        if self.replicas.stale():
            self.replicas.refresh()
        return [replica.module for replica in self.replicas.replicas(len(self.devices))]

    def __call__(self, *args, **kwargs):
        plan, flat = Cutter().plan(args, kwargs, len(self.devices))
        shards = plan.scatter(flat, self.devices)
        works = [lambda w=w, s=s: w(*s.args, **s.kwargs) for w, s in zip(self.ways(), shards, strict=False)]
        backward = LaneBackward(self.target, shards)
        found = self.apply(works if self.as_ever else backward.watched(works))
        outputs = found if self.as_ever else backward.regrown(found, self.apply)
        self.regrown.append(outputs is not found)
        return gather(outputs, plan.sizes, GatherRules(), None)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.pool.close()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def mlp():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(rows=7, *shape):
    return torch.randn(rows, *(shape or (4,)), dtype=torch.double)


def total(output):
    """A loss of everything that has a graph."""
    values = [leaf for leaf in flatten(output)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return sum((value.abs().square().sum() for value in values), torch.zeros((), dtype=torch.double))


def gradients(call, model, *args, loss=total, **kwargs):
    """The gradients of the parameters and of what the call is given."""
    leaves = [arg.requires_grad_() for arg in (*args, *kwargs.values()) if arg.is_floating_point()]
    for each in (*model.parameters(), *leaves):
        each.grad = None
    loss(call(*args, **kwargs)).backward()
    return [None if each.grad is None else each.grad.clone() for each in (*model.parameters(), *leaves)]


def assert_same(model, *args, regrown=True, lanes=2, plain=True, **kwargs):
    """The gradients through lanes are those of the call as ever, and of the plain call."""
    with Lanes(model, lanes) as own, Lanes(model, lanes, as_ever=True) as ever:
        for _ in range(3):  # a scripted model is compiled by its first calls
            found = gradients(own, model, *args, **kwargs)
        assert own.regrown == [regrown] * 3
        assert_close(found, gradients(ever, model, *args, **kwargs))
    if plain:
        assert_close(found, gradients(model, model, *args, **kwargs))


class Net(nn.Module):
    """A module whose forward is given."""

    def __init__(self, forward, *children) -> None:
        super().__init__()
        self.parts = nn.ModuleList(children)
        self.function = forward

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def net(forward, *children):
    return Net(forward, *(children or (nn.Linear(4, 4), nn.Linear(4, 4)))).double()


def first(self, x):
    return self.parts[0](x)


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()


def filled(self, x):
    out = torch.zeros_like(x)
    out[:, :2] = self.parts[0](x)[:, :2]
    out[:, 2:] = x[:, 2:].exp()
    return out


MODELS = {
    "mlp": (mlp, (4,)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)).double(), (3, 6, 6)),
    "lstm": (lambda: net(lambda self, x: self.parts[0](x)[0], nn.LSTM(4, 3, batch_first=True)), (5, 4)),
    "encoder": (encoder, (5, 8)),
    "tied": (lambda: net(lambda self, x: self.parts[0](self.parts[0](x)) @ self.parts[0].weight), (4,)),
    "unused": (lambda: net(first), (4,)),
    "scripted": (lambda: torch.jit.script(mlp()), (4,)),
    "written in place": (lambda: net(filled), (4,)),
    "views of one another": (lambda: net(lambda self, x: self.parts[0](x).chunk(2, dim=1)), (4,)),
    "one output twice": (lambda: net(lambda self, x: (self.parts[0](x),) * 2), (4,)),
    "identity": (lambda: net(lambda self, x: {"same": x, "view": x.view(x.shape), "new": self.parts[0](x)}), (4,)),
    "no graph": (lambda: net(lambda self, x: [self.parts[0](x), x.detach(), x.argmax(1), None]), (4,)),
    "complex": (lambda: net(lambda self, x: torch.complex(self.parts[0](x), self.parts[1](x)).sin()), (4,)),
    "norm": (lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)).double(), (4,)),
    "indexed": (lambda: net(lambda self, x: self.parts[0](x)[:, [0, 2]].sort(1).values.cumsum(1)), (4,)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lanes", [2, 3])
def test_the_gradients_are_the_plain_ones(name, lanes):
    """Parameters and inputs get the gradients of the plain call, and of the call as ever."""
    make, shape = MODELS[name]
    assert_same(make(), batch(7, *shape), lanes=lanes)


def test_batch_norm_in_training_is_that_of_the_lanes():
    """Each shard is normalised by itself, in backward too."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    assert_same(model, batch(9), plain=False)


def test_keyword_arguments_are_cut_off_like_positional_ones():
    """An input that requires grad may be given by name, and one that no lane uses gets no gradient."""
    model = net(lambda self, x, scale=None, unused=None: self.parts[0](x) * scale)
    assert_same(model, batch(), scale=batch(), unused=batch())


def test_an_input_given_whole_to_every_lane_gets_the_sum():
    """A broadcast input is the end of several lanes' graphs; so it is when it has a graph of its own."""
    model = net(lambda self, x, scale: self.parts[0](x) * scale)
    assert_same(model, batch(), batch(1))
    scale = batch(1).requires_grad_()

    def found(call):
        scale.grad = None
        total(call(x, scale.exp())).backward()
        return scale.grad

    x = batch()
    with Lanes(model) as own:
        assert_close(found(own), found(model))
        assert own.regrown == [True]


@pytest.mark.parametrize("again", [False, True], ids=["another model", "the same model"])
def test_an_input_that_has_a_graph_is_where_the_lanes_end(again):
    """What comes before the call is walked by the caller, once; it may lead through the same model."""
    model, between = mlp(), nn.Linear(3, 4).double()
    then = model if again else mlp()
    x = batch()

    def found(call, call_then):
        for part in (model, between, then):
            part.zero_grad()
        total(call_then(between(call(x)))).backward()
        return [p.grad.clone() for part in (model, between, then) for p in part.parameters()]

    with Lanes(model) as own, Lanes(then) as own_then:
        assert_close(found(own, own_then), found(model, then))
        assert own.regrown == [True]
        assert own_then.regrown == [not again]


def test_inputs_that_come_from_each_other_are_left_as_they_are():
    """An input given whole, from which the rows of another were computed, gets each of its gradients once."""
    model = net(lambda self, x, scale: self.parts[0](x) * scale)
    rows, leaf = batch(), batch(1).requires_grad_()

    def found(call, scale):
        leaf.grad = None
        total(call(rows * scale, scale)).backward()
        return leaf.grad

    with Lanes(model) as own:
        for scale in (lambda: leaf, lambda: leaf.exp()):
            assert_close(found(own, scale()), found(model, scale()))
        assert own.regrown == [False, False]


def test_a_sparse_gradient_stays_sparse():
    """An embedding with sparse=True gets the sum of the lanes' sparse gradients."""
    model = nn.Embedding(6, 3, sparse=True)
    ids = torch.tensor([0, 1, 5, 5, 2, 0])

    def found(call):
        model.zero_grad()
        call(ids).square().sum().backward()
        return model.weight.grad

    with Lanes(model) as own:
        grad = found(own)
        assert own.regrown == [True]
    assert grad.is_sparse
    assert_close(grad.to_dense(), found(model).to_dense())


def test_dropout_has_the_masks_of_the_forward():
    """What was dropped gets no gradient, and what was not gets its share."""
    model = net(lambda self, x: nn.functional.dropout(x * 1, 0.5))
    x = torch.ones(8, 16, requires_grad=True)
    with Lanes(model) as own:
        y = own(x)
        y.sum().backward()
        assert own.regrown == [True]
    assert_close(x.grad, y.detach())


def test_a_mean_loss_inside_the_model_weighs_the_rows():
    """0-d outputs are joined as ever."""
    model = net(lambda self, x, y: nn.functional.mse_loss(self.parts[0](x), y))
    assert_same(model, batch(11), batch(11))


def test_thirty_steps_of_training_equal_plain_training():
    """Optimizer steps through the lanes give the weights of plain training."""
    plain = mlp()
    model = copy.deepcopy(plain)
    batches = [(batch(11), batch(11, 3)) for _ in range(30)]

    def train(call, net):
        steps = torch.optim.AdamW(net.parameters(), lr=0.01)
        for x, y in batches:
            steps.zero_grad()
            nn.functional.mse_loss(call(x), y).backward()
            steps.step()

    train(plain, plain)
    with Lanes(model) as own:
        train(own, model)
        assert all(own.regrown)
    assert_close(dict(model.state_dict()), dict(plain.state_dict()))


def test_leaves_from_anywhere_get_their_gradients():
    """A tensor attribute, a global or a closure that requires grad is found by looking."""
    closure = torch.randn(4, dtype=torch.double, requires_grad=True)
    model = net(lambda self, x: self.parts[0](x) * closure + self.loose)
    model.loose = torch.randn(4, dtype=torch.double, requires_grad=True)
    x = batch()
    with Lanes(model) as own:
        total(own(x)).backward()
        assert own.regrown == [True]
    found = [closure.grad, model.loose.grad]
    closure.grad = model.loose.grad = None
    total(model(x)).backward()
    assert_close(found, [closure.grad, model.loose.grad])


def test_a_hook_on_an_input_that_is_cut_sees_the_whole_gradient():
    """The caller's input is none of the lanes' ends: its hook runs once, after them."""
    model, x = mlp(), batch().requires_grad_()
    seen = []
    x.register_hook(seen.append)
    with Lanes(model) as own:
        total(own(x)).backward()
        assert own.regrown == [True]
    assert len(seen) == 1
    assert_close(seen[0], torch.autograd.grad(total(model(x)), x)[0])


# -- where the work is done -----------------------------------------------------------------------------------------------


def noting(seen):
    """A model that notes the lane in which the middle of its backward runs."""

    def forward(self, x):
        middle = self.parts[0](x)
        middle.register_hook(lambda grad: seen.append(current_lane() and current_lane().index))
        return self.parts[1](middle)

    return net(forward)


def test_each_lane_walks_its_own_graph():
    """A hook inside a lane's graph runs in that lane, once."""
    seen = []
    with Lanes(noting(seen), 3) as own:
        total(own(batch())).backward()
    assert sorted(seen) == [0, 1, 2]


def test_lanes_walk_at_the_same_time():
    """Two lanes' backward meet at a barrier: neither waits for the other to be done."""
    gate = threading.Barrier(2, timeout=DEADLINE_S)

    def meet(grad):
        gate.wait()

    def forward(self, x):
        y = self.parts[0](x)
        y.register_hook(meet)
        return y

    with Lanes(net(forward)) as own:
        total(own(batch())).backward()
    assert not gate.broken


def test_backward_in_a_lane_waits_for_no_lane():
    """Inside a lane's work backward runs in that thread."""
    seen = []
    model = noting(seen)
    x = batch()
    plain = gradients(model, model, x)
    seen.clear()
    with Lanes(model) as own:
        for each in (*model.parameters(), x):
            each.grad = None
        loss = total(own(x))
        own.pool.submit(own.pool.lanes[1], loss.backward).result(DEADLINE_S)
    assert seen == [1, 1]
    assert_close([p.grad for p in (*model.parameters(), x)], plain)


def test_backward_may_be_called_by_another_thread():
    """The graph belongs to no thread."""
    model = mlp()
    x = batch()
    plain = gradients(model, model, x)
    with Lanes(model) as own:
        for each in (*model.parameters(), x):
            each.grad = None
        thread = threading.Thread(target=total(own(x)).backward)
        thread.start()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert_close([p.grad for p in (*model.parameters(), x)], plain)


def test_two_threads_may_walk_one_graph_at_once():
    """Backward of one kept graph from two threads gives each the gradients."""
    model = mlp()
    x = batch()
    found = {}
    with Lanes(model) as own:
        loss = total(own(x))

        def walk(name):
            for _ in range(20):
                found[name] = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)

        threads = [threading.Thread(target=walk, args=(name,)) for name in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
    plain = torch.autograd.grad(total(model(x)), list(model.parameters()))
    assert_close(found[0], plain)
    assert_close(found[1], plain)


@pytest.mark.parametrize("gone", [False, True], ids=["closed", "gone"])
def test_backward_after_the_lanes_are_closed(gone):
    """Whoever calls backward then runs every lane's part; a graph does not keep the lanes' owner alive."""
    model = mlp()
    x = batch()
    plain = gradients(model, model, x)
    for each in (*model.parameters(), x):
        each.grad = None
    own = Lanes(model)
    loss = total(own(x))
    assert own.regrown == [True]
    own.pool.close()
    if gone:
        reference = weakref.ref(own)
        del own
        gc.collect()
        assert reference() is None
    loss.backward()
    assert_close([p.grad for p in (*model.parameters(), x)], plain)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_in_a_lanes_backward_arrives_with_its_place(kind):
    """It keeps its type, notes the lane, and the lanes work on."""

    def forward(self, x):
        y = self.parts[0](x)

        def fail(grad):
            if current_lane().index == 1 and fails:
                raise kind("mine")

        y.register_hook(fail)
        return y

    fails = True
    model = net(forward)
    with Lanes(model) as own:
        with pytest.raises(kind, match="mine") as caught:
            total(own(batch())).backward()
        assert caught.value.__notes__ == ["in lane 1 on cpu, shard 1 of 2"]
        fails = False
        model.zero_grad()
        total(own(batch())).backward()
    assert model.parts[0].weight.grad is not None


def test_torchs_own_error_for_a_value_that_was_overwritten_arrives():
    """A parameter written in place between forward and backward is noticed as ever."""
    model = net(lambda self, x: self.parts[1](self.parts[0](x)))
    with Lanes(model) as own:
        loss = total(own(batch()))
        with torch.no_grad():
            model.parts[1].weight += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# -- where backward runs as ever ------------------------------------------------------------------------------------------


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        assert current_lane() is None
        return 3 * ctx.saved_tensors[0] ** 2 * grad


def on_cpu(self, x):
    with torch.autograd.graph.save_on_cpu():
        return self.parts[0](x).sin()


def watched_input(self, x):
    if x.requires_grad:
        x.register_hook(lambda grad: grad * 2)
    return self.parts[0](x)


def retained_input(self, x):
    x.retain_grad()
    return self.parts[0](x)


def packed(rows):
    return pack_padded_sequence(rows[:, None], torch.ones(len(rows)), batch_first=True, enforce_sorted=False)


def with_packed_rows(output):
    outputs = output if type(output) is tuple else (output,)
    return [each.data if isinstance(each, PackedSequence) else each for each in outputs]


LEFT_ALONE = {
    "custom function": lambda self, x: Cube.apply(self.parts[0](x)),
    "checkpoint": lambda self, x: checkpoint(self.parts[0], x, use_reentrant=False),
    "checkpoint of a part": lambda self, x: self.parts[1](checkpoint(self.parts[0], x, use_reentrant=False)),
    "reentrant checkpoint": lambda self, x: checkpoint(self.parts[0], x, use_reentrant=True),
    "saved on the cpu": on_cpu,
    "hook on the input": watched_input,
    "gradient retained by the input": retained_input,
    "no tensor with a graph": lambda self, x: x.detach(),
    "a packed sequence beside a tensor": lambda self, x: (self.parts[1](x), packed(self.parts[0](x))),
    "a packed sequence": lambda self, x: (packed(self.parts[0](x)),),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_a_lane_cannot_do_alone_is_left_as_it_is(name):
    """Where a node is Python's, a saved tensor has hooks, or a value is opaque, backward runs in the calling thread."""
    model = net(LEFT_ALONE[name])
    if name == "no tensor with a graph":
        with Lanes(model) as own:
            assert not own(batch().requires_grad_()).requires_grad
            assert own.regrown == [False]
    else:
        assert_same(model, batch(8), regrown=False, loss=lambda y: total(with_packed_rows(y)))


@pytest.mark.parametrize("hook", ["forward_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_a_module_with_hooks_is_left_as_it_is(hook):
    """A hook on a part of the module may keep what it sees, and counts on the thread."""
    model = mlp()
    handle = getattr(model[1], f"register_{hook}")(lambda *_: None)
    assert_same(model, batch(), regrown=False)
    handle.remove()
    assert_same(model, batch())


def test_a_hook_on_every_module_is_seen_too():
    """So is one that torch calls for all modules."""
    model = mlp()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert_same(model, batch(), regrown=False)
    finally:
        handle.remove()


@pytest.mark.parametrize("when", ["before the call", "after it"])
def test_a_hook_on_a_parameter_sees_the_sum_once(when):
    """It never sees one lane's part, and what it makes of the gradient is what the parameter gets."""
    model = net(first)
    weight = model.parts[0].weight
    x = batch()
    plain = gradients(model, model, x)[0]
    weight.grad = None
    seen = []

    def double(grad):
        seen.append(grad)
        return grad * 2

    with Lanes(model) as own:
        if when == "before the call":
            weight.register_hook(double)
        loss = total(own(x))
        if when == "after it":
            weight.register_hook(double)
        loss.backward()
        assert own.regrown == [when == "after it"]
    assert len(seen) == 1
    assert_close(seen[0], plain)
    assert_close(weight.grad, plain * 2)


def test_a_hook_after_accumulation_runs_once():
    """A post-accumulate hook finds the whole gradient in .grad, and is no reason to leave anything as it is."""
    model = net(first)
    seen = []
    model.parts[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    with Lanes(model) as own:
        total(own(batch())).backward()
        assert own.regrown == [True]
    assert len(seen) == 1
    assert_close(seen[0], model.parts[0].weight.grad)


def test_a_gradient_retained_after_the_forward_is_the_whole_one():
    """An input that every lane got whole, asked to keep its gradient after the call, keeps the sum."""
    model = net(lambda self, x, scale: self.parts[0](x) * scale)
    x, scale = batch(), batch(1).requires_grad_()

    def found(call):
        middle = scale.exp()
        y = call(x, middle)
        middle.retain_grad()
        total(y).backward()
        return middle.grad

    with Lanes(model) as own:
        assert_close(found(own), found(model))
        assert own.regrown == [True]


def test_a_parameter_frozen_after_the_forward_gets_no_gradient():
    """requires_grad_(False) between forward and backward has the effect it has on any graph."""
    model = mlp()
    with Lanes(model) as own:
        loss = total(own(batch()))
        model[0].weight.requires_grad_(requires_grad=False)
        loss.backward()
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None


@pytest.mark.parametrize("lanes", [(0, 1), (1,)], ids=["every lane", "one lane"])
def test_what_was_computed_before_the_call_is_left_to_the_caller(lanes):
    """A tensor with a graph that lanes find lying about is not theirs: the caller may walk that graph from elsewhere."""

    def forward(self, x):
        y = self.parts[0](x)
        return y * self.scale[0] if current_lane() is None or current_lane().index in lanes else y * 1

    model = net(forward)
    x = batch(8)
    found = []
    for as_ever in (False, True):
        model.zero_grad()
        model.scale = [model.parts[1].weight.exp().sum()]
        with Lanes(model, as_ever=as_ever) as own:
            (total(own(x)) + model.scale[0]).backward()
            assert own.regrown == [False]
        found.append([p.grad for p in (*model.parts[0].parameters(), model.parts[1].weight)])
        assert model.parts[1].bias.grad is None
    assert_close(*found)


def test_what_a_lane_kept_from_its_last_call_is_left_to_the_caller():
    """A state that is carried over with its graph has a backward through both calls, in one pass."""
    states = {}

    def forward(self, x):
        lane = current_lane().index
        states[lane] = self.parts[0](x) + (self.parts[1](states[lane]) if lane in states else 0)
        return states[lane]

    model = net(forward)
    x = batch(8)
    found = []
    for as_ever in (False, True):
        states.clear()
        model.zero_grad()
        with Lanes(model, as_ever=as_ever) as own:
            (total(own(x)) + total(own(x))).backward()
            assert own.regrown == [not as_ever, False]
        found.append([p.grad.clone() for p in model.parameters()])
    assert_close(*found)


@pytest.mark.parametrize("kind", ["parameter", "tensor"])
def test_an_output_that_is_a_leaf_is_that_leaf(kind):
    """What all lanes return is returned itself."""
    leaf = torch.randn(4, dtype=torch.double, requires_grad=True)
    model = net(lambda self, x: (self.parts[0](x), self.parts[0].weight if kind == "parameter" else leaf))
    with Lanes(model) as own:
        assert own(batch())[1] is (model.parts[0].weight if kind == "parameter" else leaf)
        assert own.regrown == [False]


def test_what_one_lane_computes_for_another_is_left_as_it_is():
    """A node that two lanes reach is told from a lane's own even where its number might be that of the other lane."""
    shared, there, done = [], threading.Event(), threading.Event()

    def forward(self, x):
        if current_lane().index == 0:
            shared.append(self.parts[1].weight.exp().sum())
            there.set()
            assert done.wait(DEADLINE_S)
        else:
            assert there.wait(DEADLINE_S)
            while (self.parts[1].weight * 1).grad_fn._sequence_nr() <= shared[0].grad_fn._sequence_nr():
                pass
            done.set()
        return self.parts[0](x) * shared[0]

    model = net(forward)
    with Lanes(model) as own:
        total(own(batch())).backward()
        assert own.regrown == [False]
    assert model.parts[1].weight.grad is not None


def test_modes_that_follow_every_node_leave_the_graph_as_it_is():
    """Anomaly mode and forward-mode AD see what they see as ever; without a graph there is nothing to do."""
    model = mlp()
    x = batch()
    with Lanes(model) as own:
        with torch.autograd.set_detect_anomaly(True):
            total(own(x)).backward()
        with forward_ad.dual_level():
            y = own(forward_ad.make_dual(x, torch.ones_like(x)))
            assert forward_ad.unpack_dual(y).tangent is not None
        with torch.no_grad():
            assert not own(x).requires_grad
        with torch.inference_mode():
            assert own(x).is_inference()
        assert own.regrown == [False] * 4


def test_an_input_that_a_lane_writes_is_left_as_it_is():
    """An input with a graph that forward wrote in place is not where the lane's graph ends any more."""

    def forward(self, x, scale):
        return self.parts[0](x) * scale.mul_(2) if current_lane().index == 0 else self.parts[1](x)

    with Lanes(net(forward)) as own:
        total(own(batch(), batch(1).requires_grad_() * 1)).backward()
        assert own.regrown == [False]


@pytest.mark.parametrize(("name", "value"), [("_backward.SHOWS_HOOKS", False), ("_recorded._FARTHEST", 1)])
def test_what_cannot_be_looked_through_is_left_as_it_is(monkeypatch, name, value):
    """So is a graph where torch does not tell of hooks on saved tensors, and one that begins too far back."""
    monkeypatch.setattr(f"parawrap.engine.{name}", value)
    model = mlp()
    leaf = batch().requires_grad_()
    with Lanes(model) as own:
        total(own(leaf.exp().sin())).backward()
        assert own.regrown == [False]
    found = leaf.grad
    leaf.grad = None
    total(model(leaf.exp().sin())).backward()
    assert_close(found, leaf.grad)


def test_a_call_of_one_row_is_left_as_it_is():
    """One lane alone would only be in the caller's way."""
    model = mlp()
    assert_same(model, batch(1), regrown=False)


def test_under_autocast_the_gradients_are_those_of_the_lanes():
    """Whichever lane casts a weight for all, each gradient is there once."""
    model = mlp().float()
    x = batch().float()
    with torch.autocast("cpu", torch.bfloat16), Lanes(model) as own, Lanes(model, as_ever=True) as ever:
        found = gradients(own, model, x)
        assert_close(found, gradients(ever, model, x), rtol=0.02, atol=0.02)


# -- what is asked for ----------------------------------------------------------------------------------------------------


def test_only_what_is_asked_for_is_computed():
    """torch.autograd.grad of some tensors accumulates nothing, and does not walk to the others."""
    seen = []
    model = noting(seen)
    x = batch().requires_grad_()
    weight = model.parts[1].weight
    with Lanes(model) as own:
        (found,) = torch.autograd.grad(total(own(x)), [weight])
        assert own.regrown == [True]
        assert seen == []
        assert all(p.grad is None for p in (*model.parameters(), x))
        total(own(x)).backward(inputs=[weight])
    assert [p.grad is not None for p in model.parameters()] == [p is weight for p in model.parameters()]
    assert x.grad is None
    assert_close(found, weight.grad)
    assert_close(found, torch.autograd.grad(total(model(x)), [weight])[0])


def test_an_unused_tensor_has_no_gradient():
    """allow_unused=True gives None for what no lane used."""
    model = net(first)
    with Lanes(model) as own:
        used, unused = torch.autograd.grad(
            total(own(batch())), [model.parts[0].weight, model.parts[1].weight], allow_unused=True
        )
    assert used is not None
    assert unused is None


def test_an_output_that_the_loss_does_not_use_costs_nothing():
    """A loss of one output of two walks from that one alone."""
    seen = []

    def forward(self, x):
        used, unused = self.parts[0](x), self.parts[1](x)
        unused.register_hook(seen.append)
        return used, unused

    model = net(forward)
    x = batch()
    with Lanes(model) as own:
        found = gradients(own, model, x, loss=lambda y: total(y[0]))
        assert own.regrown == [True]
    assert seen == []
    assert_close(found, gradients(model, model, x, loss=lambda y: total(y[0])))


def penalty(call, model, x):
    """A loss with a penalty on the gradient of the same call."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = call(x)
    (grad,) = torch.autograd.grad(total(y), x, create_graph=True)
    (total(y) + (grad.norm(dim=1) - 1).square().sum()).backward()
    return [p.grad for p in model.parameters()], x.grad


@pytest.mark.parametrize("lanes", [2, 3])
def test_gradients_of_gradients_are_the_plain_ones(lanes):
    """A gradient penalty beside the loss of the same call: each lane's graph is walked twice in one backward."""
    model, x = mlp(), batch()
    with Lanes(model, lanes) as own:
        assert_close(penalty(own, model, x), penalty(model, model, x))
        assert own.regrown == [True]


def test_second_derivatives_stand_up_to_finite_differences():
    """torch.autograd.gradgradcheck passes for input and parameters."""
    model, x = mlp(), batch(4).requires_grad_()
    with Lanes(model) as own:
        assert torch.autograd.gradgradcheck(lambda *_: own(x), (x, *model.parameters()))


def test_third_derivatives_are_the_plain_ones():
    """A graph of a graph of a graph."""
    model, x = mlp(), batch().requires_grad_()

    def third(call):
        value = total(call(x))
        for _ in range(3):
            (grad,) = torch.autograd.grad(value, x, create_graph=True)
            value = grad.sin().sum()
        return torch.autograd.grad(value, [x, model[0].weight])

    with Lanes(model) as own:
        assert_close(third(own), third(model))


def test_a_jacobian_in_one_pass_is_the_plain_one():
    """A batch of gradients goes through the lanes at once."""
    model, x = mlp(), batch()
    with Lanes(model) as own:
        found = torch.autograd.functional.jacobian(own, x, vectorize=True)
        assert own.regrown == [True]
    assert_close(found, torch.autograd.functional.jacobian(model, x, vectorize=True))


def test_a_mode_of_the_calling_thread_sees_all_of_backward():
    """A FLOP counter around backward counts every lane's part."""
    model, x = mlp(), batch(8)
    with Lanes(model) as own, Lanes(model, as_ever=True) as ever:
        counts = []
        for call in (own, ever):
            loss = total(call(x))
            with FlopCounterMode(display=False) as counter:
                loss.backward()
            counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_what_forward_keeps_may_be_part_of_the_loss():
    """A term that forward puts into a list has its gradient beside the output's."""
    kept = []

    def forward(self, x):
        middle = self.parts[0](x).sin()
        kept.append(middle)
        return self.parts[1](middle).cos()

    model = net(forward)
    x = batch()

    def found(call):
        kept.clear()
        return gradients(call, model, x, loss=lambda y: total(y) + sum(map(total, kept)))

    with Lanes(model) as own:
        assert_close(found(own), found(model))
        assert own.regrown == [True]


def test_the_joined_output_may_be_written_in_place():
    """The joined output is the caller's to write: nothing that a lane saved is in its memory."""
    model = net(lambda self, x: self.parts[0](x).sigmoid())
    assert_same(model, batch(), loss=lambda y: total(y.sub_(0.5).mul_(2)), plain=False)


def test_a_gradient_retained_inside_the_lane_is_there():
    """retain_grad() in forward keeps the gradient of that lane's rows."""
    kept = {}

    def forward(self, x):
        middle = self.parts[0](x)
        middle.retain_grad()
        kept[0 if current_lane() is None else current_lane().index] = middle
        return middle.sin()

    model = net(forward)
    x = batch()
    with Lanes(model) as own:
        total(own(x)).backward()
        assert own.regrown == [True]
        found = torch.cat([kept[0].grad, kept[1].grad])
    total(model(x)).backward()
    assert_close(found, kept[0].grad)


# -- how long graphs live -------------------------------------------------------------------------------------------------


def saving(saved):
    """A model that notes a weak reference to what its graph saves."""

    def forward(self, x):
        middle = self.parts[0](x)
        saved.append(weakref.ref(middle))
        return middle.sin()

    return net(forward)


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive(saved):
    return [reference() is not None for reference in saved]


@pytest.mark.usefixtures("no_collector")
def test_backward_frees_the_graph_while_the_loss_is_held():
    """Without retain_graph nothing of what the lanes saved is left; with it all of it is."""
    saved = []
    with Lanes(saving(saved)) as own:
        loss = own(batch()).sum()
        assert alive(saved) == [True, True]
        loss.backward(retain_graph=True)
        assert alive(saved) == [True, True]
        loss.backward()
        assert alive(saved) == [False, False]
        with pytest.raises(RuntimeError, match="Saved intermediate values of the graph are freed when"):
            loss.backward()


def test_a_graph_that_was_kept_gives_the_same_gradients_again():
    """retain_graph=True, twice."""
    model, x = mlp(), batch()
    with Lanes(model) as own:
        loss = total(own(x))
        once = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        assert_close(torch.autograd.grad(loss, list(model.parameters())), once)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("way", ["no backward", "create_graph", "error"])
def test_nothing_is_left_when_the_loss_is_dropped(way):
    """No cycle keeps a call's tensors, whatever was done with its graph."""
    saved = []
    model = saving(saved)
    x = batch().requires_grad_()
    with Lanes(model) as own:
        loss = total(own(x))
        if way == "create_graph":
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            total(grad).backward()
            del grad
        elif way == "error":
            with torch.no_grad():
                saved[1]().add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        assert own.regrown == [True]
        del loss
        if way == "error":
            gc.collect()  # an exception that was caught is part of a cycle
        assert alive(saved) == [False, False]


@pytest.mark.usefixtures("no_collector")
def test_each_lane_frees_its_own_graph():
    """What a lane saved is let go of in that lane: the calling thread need not wait for all of it."""
    freed = []

    def forward(self, x):
        middle = self.parts[0](x)
        weakref.finalize(middle, lambda: freed.append(current_lane() and current_lane().index))
        return middle.sin()

    with Lanes(net(forward)) as own:
        total(own(batch())).backward()
    assert sorted(freed) == [0, 1]
