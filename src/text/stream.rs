//! Text out of ids as they come: whole characters only, and nothing of a stop string.

use super::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Turns ids into text one by one. A character that is not complete yet is held back, at most three bytes;
/// what was released, joined and followed by [`StreamDecoder::finish`], is [`Tokenizer::decode`] of all the
/// ids, whatever the tokens' boundaries.
#[derive(Debug, Clone, Default)]
pub struct StreamDecoder {
    /// Holds an unfinished sequence between calls.
    pending: Vec<u8>,
}

impl StreamDecoder {
    /// A decoder with nothing held back.
    pub fn new() -> StreamDecoder {
        StreamDecoder::default()
    }

    /// Adds one id and returns the text it completes, which may be empty.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        self.push_bytes(tokenizer.lossy_bytes(id))
    }

    /// Adds bytes and returns the text they complete, which may be empty.
    pub fn push_bytes(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let mut held = self.pending.as_slice();
        loop {
            let error = match std::str::from_utf8(held) {
                Ok(all) => {
                    text.push_str(all);
                    held = &[];
                    break;
                }
                Err(error) => error,
            };
            let (valid, rest) = held.split_at_checked(error.valid_up_to()).unwrap_or((held, &[]));
            text.push_str(std::str::from_utf8(valid).unwrap_or_default());
            held = rest;
            match error.error_len() {
                // Never a character, whatever follows.
                Some(invalid) => {
                    text.push(char::REPLACEMENT_CHARACTER);
                    held = held.get(invalid..).unwrap_or_default();
                }
                // A character may still come of it.
                None => break,
            }
        }
        let keep = self.pending.len() - held.len();
        self.pending.drain(..keep);
        text
    }

    /// Ends the text: an unfinished character becomes U+FFFD. The decoder is then as new.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }
}

/// What a stretch of text did to a [`StopMatcher`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StopStep {
    /// Text that is certainly not part of a stop string, to be passed on.
    pub text: String,
    /// The stop string that matched, as its index in the list. Nothing is released after it.
    pub stopped: Option<usize>,
}

/// Watches text for stop strings that may span tokens. Text is held back while its end could still grow into
/// a stop string, and released once it cannot.
///
/// The match that is complete first wins, so the result does not depend on how the text was divided;
/// of several complete at the same character, the longest. Text from the start of the match on is dropped.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    stops: Vec<Stop>,
    held: String,
    stopped: Option<usize>,
}

#[derive(Debug, Clone)]
struct Stop {
    bytes: Vec<u8>,
    /// `border[n]`: the longest proper prefix of the first `n + 1` bytes that is also their suffix.
    border: Vec<usize>,
    /// Bytes of it that the text so far ends with.
    matched: usize,
}

impl Stop {
    /// From a text that is not empty.
    fn new(text: &str) -> Stop {
        let mut stop = Stop { bytes: text.as_bytes().to_vec(), border: vec![0], matched: 0 };
        // The borders are what the stop itself leaves matched when it is read from its second byte on.
        for byte in text.bytes().skip(1) {
            stop.advance(byte);
            stop.border.push(stop.matched);
        }
        stop.matched = 0;
        stop
    }

    /// Reads one byte; `true` when the whole stop has been read.
    fn advance(&mut self, byte: u8) -> bool {
        loop {
            if self.bytes.get(self.matched) == Some(&byte) {
                self.matched += 1;
                return self.matched == self.bytes.len();
            }
            if self.matched == 0 {
                return false;
            }
            self.matched = self.border.get(self.matched - 1).copied().unwrap_or(0);
        }
    }
}

impl StopMatcher {
    /// Watches for any of `stops`; none is allowed.
    ///
    /// # Errors
    /// `Usage` for an empty stop string.
    pub fn new<S: AsRef<str>>(stops: &[S]) -> Result<StopMatcher> {
        if stops.iter().any(|s| s.as_ref().is_empty()) {
            return Err(Error::usage("a stop string is empty").expected("at least one character", "\"\""));
        }
        let stops = stops.iter().map(|s| Stop::new(s.as_ref())).collect();
        Ok(StopMatcher { stops, held: String::new(), stopped: None })
    }

    /// Adds text. Once a stop has matched, everything more is dropped.
    pub fn push(&mut self, text: &str) -> StopStep {
        if self.stopped.is_some() {
            return StopStep { text: String::new(), stopped: self.stopped };
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (i, byte) in text.bytes().enumerate() {
            let mut longest = 0;
            for (n, stop) in self.stops.iter_mut().enumerate() {
                if stop.advance(byte) && stop.bytes.len() > longest {
                    longest = stop.bytes.len();
                    self.stopped = Some(n);
                }
            }
            if self.stopped.is_some() {
                self.held.truncate(before + i + 1 - longest);
                return StopStep { text: std::mem::take(&mut self.held), stopped: self.stopped };
            }
        }
        // Stops and text are whole characters, so a stop's beginning is a boundary in the text.
        let hold = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let held = self.held.split_off(self.held.len() - hold);
        StopStep { text: std::mem::replace(&mut self.held, held), stopped: None }
    }

    /// Ends the text: what was held back turned out not to be a stop string. The matcher is then as new.
    pub fn finish(&mut self) -> String {
        self.stopped = None;
        for stop in &mut self.stops {
            stop.matched = 0;
        }
        std::mem::take(&mut self.held)
    }
}
