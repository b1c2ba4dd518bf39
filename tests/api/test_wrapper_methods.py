"""Methods above and below ``@wrapper``, including the binding rules of Python 3.13."""

from __future__ import annotations

import copy
import pickle
import threading
import types

import cloudpickle
import pytest

from parawrap import UnsendableError, current_rank, wrapper
from tests.helpers.decorated_methods import Model, Small, launched
from tests.helpers.processes import ranks


@pytest.mark.parametrize("kind", ["above", "unchained", "below", "static_above", "static_below"])
def test_methods_run_on_their_class(kind):
    """A class method runs on its class, through an object, a subclass, or a pickle."""
    bias = 0 if kind.startswith("static") else 10
    assert getattr(Model(), kind)(1) == (bias + 1,)
    method = getattr(Small, kind)
    assert method(1) == pickle.loads(pickle.dumps(method))(1) == (1,)
    if isinstance(method, types.MethodType):  # Python does not pass the class to `submit`
        with pytest.raises(TypeError, match=r"@wrapper.*@classmethod|@classmethod.*@wrapper"):
            method.submit(1)
    else:
        assert method.submit(1).results() == (1,)


def test_methods_run_on_their_object():
    """A method runs on its object, through the object, the class, super(), `map`, a pickle, or a
    copy.
    """
    model = Model(bias=3)
    assert Model.method(model, 1) == model.method.submit(1).results() == (4,)
    assert [outcome[0] for outcome in model.method.map([1, 2])] == [4, 5]
    assert Small().through_super(1) == Small().method(1) == (1,)
    for duplicate in (
        copy.copy(model.method),
        copy.deepcopy(model.method),
        pickle.loads(pickle.dumps(model.method)),
        cloudpickle.loads(cloudpickle.dumps(model.method)),
    ):
        assert duplicate.platform == model.method.platform
        assert duplicate.inline(1) == (4,)


def test_addresses_do_not_count_self():
    lock = threading.Lock()
    with pytest.raises(
        UnsendableError, match=r"^args\[0\]\[1\] cannot be sent to another process: lock"
    ):
        Model().method([0, lock])
    with pytest.raises(
        UnsendableError, match=r"^the object\.lock cannot be sent to another process: lock"
    ):
        Model(lock=lock).method(1)


def test_decorated_values_in_ranks():
    """Decorated functions, and objects of local classes with decorated methods, are arguments and
    results.
    """

    class Local:
        @launched
        def __call__(self, x):
            return x + current_rank().global_rank

    def receive(function, *models):
        return function.__wrapped__(3), [model.method.__wrapped__(3) for model in models], function

    called, models, back = wrapper(ranks(2))(receive)(
        launched(lambda x: x + 1), Model(bias=2), Small()
    )[1]
    assert (called, models) == (4, [5, 3])
    assert back(1) == (2,)
    assert wrapper(ranks(2))(lambda model: model)(Local())[0](1) == Local()(1) == (1,)
