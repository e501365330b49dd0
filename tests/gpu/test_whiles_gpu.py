"""Loops whose number of turns is not known, on an NVIDIA GPU: one op each."""
from __future__ import annotations

import pytest
import tensorflow as tf

from tests.gpu.test_op_gpu import exact_float32  # noqa: F401 (a fixture)
from tests.graph.test_whiles import (  # noqa: F401 (fixtures and tests that hold on a GPU, too)
    LOOP,
    both,
    executed,
    gathering,
    graphs,
    independent,
    loops,
    switched_off,
    test_a_condition_that_depends_on_data,
    test_a_layers_loop_is_one_op,
    test_a_loop_and_its_gradients_are_two_ops,
    test_a_loop_in_a_branch,
    test_a_value_stays_what_it_was_for_who_reads_it_later,
    test_any_number_of_turns_none_too,
    test_errors_of_a_turn_are_tensorflows,
    test_fit_over_sequences_of_several_lengths,
    test_gradients_through_loops,
    test_lists_that_turns_fill_and_read,
    test_masked_steps_hand_on_the_state,
    test_random_numbers_are_drawn_in_every_turn,
    test_several_loops_in_a_graph,
    test_threads_share_a_loop,
    test_variables_are_read_in_every_call,
    test_variables_that_change_places,
    x_of,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]


def test_what_a_program_refuses_its_fallback_does(graphs):  # noqa: F811
    """A row that is not there is zeros to TensorFlow on a GPU; on a CPU it is an error."""
    x = x_of(3, 4) * 0.1
    both(gathering, (x, tf.constant(3)), (x, tf.constant(4)), signature=LOOP)
    assert loops(graphs) == (1, 0)


def test_turns_that_need_nothing_of_each_other(graphs):  # noqa: F811
    """A device has one queue: nothing is gained by several turns at once."""
    both(independent, (x_of(3, 4), tf.constant(2)), (x_of(7, 4), tf.constant(2)), signature=LOOP)
    assert loops(graphs) == (1, 0)
