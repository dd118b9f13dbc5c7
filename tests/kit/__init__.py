"""The vocabulary of tests that train on ranks.

A test describes runs, does something with each on gloo ranks, and compares what they return:

    CASES = {
        "tensor": Case(parallel=ParallelSpec(tp=2)),
        "replicas": Case(parallel=ParallelSpec()),
        "no maximum": Case(
            parallel=ParallelSpec(tp=2),
            faults=(Fault("megafp8.optim.masters.Masters.agree", unchanged, rank=1),),
        ),
    }

    def gradients(case: Case, mesh: Mesh) -> list[Piece]:  # of a module: ranks import it
        state = case.build(mesh)
        train(state, case, steps=2)
        return pieces(state, state.masters.stored_grads)

    def test_gradients_are_those_of_one_process() -> None:
        ranks = on_ranks(gradients, CASES, size=2)  # by case, then by rank
        (one,) = alone(gradients, {"one": Case()}).values()
        assert_close(assembled(ranks["tensor"]), assembled([one]), 2e-5)

| file | words |
|---|---|
| `cases.py` | `Case` describes a run: model, precision, layout (`ParallelSpec` with tp, cp, dp, pp), \
optimizer, text, a checkpoint to begin with or to write, and what is planted. `build(mesh)` makes \
its state, `microbatches(step, mesh)` this rank's text, and `spec()` its `RunSpec`. |
| `runs.py` | `on_ranks(work, cases, size)`, `alone(work, cases)`; `on_mesh(work, size)` for what \
needs no case; `train(state, case)`, which returns `Steps`: results, losses, norms, bytes sent |
| `tensors.py` | `Piece`, a rank's part of a logical tensor: `pieces`, `weights`, `saved`; whole \
tensors of all ranks: `assembled`, which also compares copies bit for bit; `assert_same` (bit for \
bit), `assert_close` (a bound of the largest element), `errors` |
| `faults.py` | `Fault`, an error planted by a dotted name, on all ranks or on one; `planted` is \
the context for what has no case |

Beside them, `tests/tiny.py` has the small model and `tests/ranks.py` starts the processes. Several
tests share one training by a fixture with `scope="module"` that returns `on_ranks(...)`; a state
that later runs continue is a case with `saves=folder`, and theirs have `begins=step_folder`.

What ranks return is pickled, and so are the cases: tensors may be in it, but none in FP8 (`pieces`
has their numbers), no models and no closures. `work` and `Fault.wrong` are functions of modules, or
a `functools.partial` of one.
"""
