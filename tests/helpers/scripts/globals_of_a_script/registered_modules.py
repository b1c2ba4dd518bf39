"""A module that is registered to go by value is sent as it is here, also after each reload.
Others are imported.
"""

import functools
import importlib
import pathlib
import sys

import cloudpickle
from script_checks import same

from parawrap import Platform

platform = Platform(device="cpu", n_cpus=2, verbose=False)

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path.cwd()))
pathlib.Path("edited").mkdir()
pathlib.Path("edited/__init__.py").touch()


def write(number):
    pathlib.Path("edited/steps.py").write_text(
        # a file of another size: ranks write bytecode within the same second
        "import functools\n" * number + "from parawrap import Platform, wrapper\n"
        "def doubling(f): return functools.wraps(f)(lambda: 2 * f())\n"
        f"def helper(): return {number}\n"
        "def plain(): return helper()\n"
        "@doubling\n"
        "def doubled(): return helper()\n"
        "@wrapper(Platform(device='cpu', n_cpus=2))\n"
        "def launched(): return helper()\n"
        "@functools.cache\n"
        "def cached(): return helper()\n"
    )


write(1)
import edited  # noqa: E402 (the lines above write it)
import edited.steps as steps  # noqa: E402
from edited.steps import helper  # noqa: E402


def by_module():
    return steps.plain()


def by_package():
    return edited.steps.plain()


def by_name():
    return helper()


def by_wrapper():
    return wrapped()


def by_launched():
    return launched.__wrapped__()


def edit(number):
    global helper, wrapped, launched
    write(number)
    importlib.reload(steps)
    helper, launched, wrapped = steps.helper, steps.launched, functools.partial(steps.plain)


def numbers():
    functions = [steps.plain, steps.doubled, steps.launched, steps.cached]
    functions += [by_module, by_name, by_wrapper, by_launched]
    return [ranks(function)[1] for function in functions]


def expected(number):
    return [number, 2 * number, *[number] * 6]


edit(1)
with platform.open() as ranks:
    for registered in (steps, edited):
        same([numbers(), numbers()], [expected(1)] * 2)
        edit(2)
        cloudpickle.register_pickle_by_value(registered)
        same([numbers(), numbers()], [expected(2)] * 2)
        by_package_too = registered is edited
        same(ranks(by_package)[0], 2 if by_package_too else 1)
        edit(3)
        same([numbers(), numbers()], [expected(3)] * 2)
        same(ranks(by_package)[0], 3 if by_package_too else 1)
        cloudpickle.unregister_pickle_by_value(registered)
        same(numbers(), expected(1))
    # the same objects, which only travel in another way
    ranks(lambda: setattr(steps, "helper", lambda: 5))
    same([ranks(by_name)[0], ranks(steps.plain)[0]], [1, 5])
    cloudpickle.register_pickle_by_value(steps)
    same([ranks(by_name)[0], ranks(steps.plain)[0]], [3, 3])
    cloudpickle.unregister_pickle_by_value(steps)
