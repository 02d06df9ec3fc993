//! Text to ids and back, against vectors made with the release's own rules, over the released vocabulary and
//! over a small one.

use std::fmt::Write as _;
use std::path::Path;

use proptest::prelude::*;
use serde_json::Value;
use sha2::{Digest, Sha256};
use trunkline::Kind;
use trunkline::text::stream::{StopMatcher, StopStep, StreamDecoder};
use trunkline::text::tokenizer::{Segment, Tokenizer};

#[path = "common/vocabulary.rs"]
mod vocabulary;

use vocabulary::{REAL_BASE, TINY_MODEL, ids, list, real, real_model, text, tiny, tiny_vectors, vectors};

fn hex(bytes: impl AsRef<[u8]>) -> String {
    bytes.as_ref().iter().fold(String::new(), |mut s, b| {
        let _ = write!(s, "{b:02x}");
        s
    })
}

#[test]
fn the_rebuilt_rank_file_is_the_released_one() {
    assert_eq!(real_model().len(), 2_795_286);
    let sha = hex(Sha256::digest(real_model()));
    assert_eq!(sha, text(&vectors()["provenance"], "tiktoken_model_sha256"));
    assert!(sha.starts_with("b6c497a7") && sha.ends_with("5103"));
    assert_eq!(hex(Sha256::digest(TINY_MODEL)), text(tiny_vectors(), "sha256"));
}

#[test]
fn every_text_has_its_ids() {
    for (tokenizer, file) in [(real(), vectors()), (tiny(), tiny_vectors())] {
        let texts = list(file, "texts");
        assert!(texts.len() > 200);
        for case in texts {
            let s = text(case, "text");
            let expected = ids(&case["ids"]);
            assert_eq!(tokenizer.encode(s, false).unwrap(), expected, "{s:?}");
            let special = case.get("ids_special").map_or(expected.clone(), ids);
            assert_eq!(tokenizer.encode(s, true).unwrap(), special, "{s:?}");
            assert_eq!(tokenizer.decode(&expected), s);
            assert_eq!(tokenizer.try_decode(&special).unwrap(), s);
        }
    }
}

#[test]
fn long_runs_are_cut_before_they_are_encoded() {
    let cases = list(vectors(), "long_texts");
    assert!(cases.len() >= 9);
    for case in cases {
        let unit = text(case, "unit");
        let s = unit.repeat(case["count"].as_u64().unwrap() as usize) + text(case, "suffix");
        let found = real().encode(&s, false).unwrap();
        let name = format!("{unit:?} x {}", case["count"]);
        assert_eq!(found.len() as u64, case["n"].as_u64().unwrap(), "{name}");
        assert_eq!(found[..8], ids(&case["first"]), "{name}");
        assert_eq!(found[found.len() - 8..], ids(&case["last"]), "{name}");
        let bytes: Vec<u8> = found.iter().flat_map(|id| id.to_le_bytes()).collect();
        assert_eq!(hex(Sha256::digest(&bytes)), text(case, "sha256_u32le"), "{name}");
        assert_eq!(real().decode(&found), s, "{name}");
    }
}

#[test]
fn a_million_spaces_are_encoded_right() {
    // A pattern with a lookahead gives up on such a run unless it is cut first.
    let s = format!("a{}b", " ".repeat(1_000_000));
    let found = real().encode(&s, false).unwrap();
    assert_eq!(real().decode(&found), s);
    // Inside a window every full run of 25,000 spaces gets the same ids.
    let run = real().encode(&" ".repeat(25_000), false).unwrap();
    assert_eq!(found[1..1 + run.len()], run);
    assert_eq!(found[1 + run.len()..1 + 2 * run.len()], run);
}

#[test]
fn completions_decode_exactly() {
    let cases = list(vectors(), "completions");
    assert!(cases.len() >= 18);
    for case in cases {
        let ids = ids(&case["ids"]);
        assert_eq!(real().decode(&ids), text(case, "text"), "{}", case["name"]);
    }
}

#[test]
fn chats_have_their_ids_segment_by_segment() {
    let tiny_cases = list(tiny_vectors(), "chats");
    let mut joined_differs = 0;
    for case in list(vectors(), "chats") {
        let name = text(case, "name");
        let segments: Vec<Segment> = list(case, "segments")
            .iter()
            .map(|s| Segment { text: s[0].as_str().unwrap().into(), special: s[1].as_bool().unwrap() })
            .collect();
        assert_eq!(real().encode_segments(&segments).unwrap(), ids(&case["ids"]), "{name}");
        let in_tiny = tiny_cases.iter().find(|c| c["name"] == name).expect("the same chats");
        assert_eq!(tiny().encode_segments(&segments).unwrap(), ids(&in_tiny["ids"]), "{name}");
        let joined = real().encode(text(case, "text"), true).unwrap() != ids(&case["ids"]);
        assert_eq!(joined, case["joined_encoding_differs"].as_bool().unwrap(), "{name}");
        joined_differs += usize::from(joined);
    }
    assert!(joined_differs > 0);
}

#[test]
fn c27_special_ids_are_absolute_and_named() {
    for (tokenizer, base) in [(real(), REAL_BASE as u32), (tiny(), 1792)] {
        let names = vectors()["named_specials"].as_object().unwrap();
        assert_eq!(tokenizer.vocab_size(), base as usize + 256);
        for (name, id) in names {
            let id = id.as_u64().unwrap() as u32 - REAL_BASE as u32 + base;
            assert_eq!(tokenizer.special_id(name), Some(id), "{name}");
            assert_eq!(tokenizer.token_bytes(id), Some(name.as_bytes()));
            assert_eq!(tokenizer.encode(name, true).unwrap(), [id]);
            // The reserved spelling of an id that has a name is text.
            let reserved = format!("<|reserved_token_{id}|>");
            assert_eq!(tokenizer.special_id(&reserved), None);
            assert!(tokenizer.encode(&reserved, true).unwrap().len() > 1);
        }
        for id in base..base + 256 {
            assert!(tokenizer.is_special(id));
            let name = tokenizer.decode(&[id]);
            assert_eq!(tokenizer.special_id(&name), Some(id));
            if !names.contains_key(&name) {
                assert_eq!(name, format!("<|reserved_token_{id}|>"));
                assert_eq!(tokenizer.encode(&format!("a{name}b"), true).unwrap()[1], id);
            }
        }
        assert!(!tokenizer.is_special(base - 1) && !tokenizer.is_special(base + 256));
    }
}

#[test]
fn c27_every_id_decodes_and_none_panics() {
    for tokenizer in [real(), tiny()] {
        let vocab = tokenizer.vocab_size() as u32;
        let mut not_utf8 = 0;
        for id in 0..vocab {
            let bytes = tokenizer.token_bytes(id).expect("every id has bytes");
            assert_eq!(tokenizer.decode(&[id]), String::from_utf8_lossy(bytes));
            not_utf8 += usize::from(std::str::from_utf8(bytes).is_err());
        }
        if vocab as usize == REAL_BASE + 256 {
            assert_eq!(not_utf8, 1_172);
        }
        let all: Vec<u32> = (0..vocab).collect();
        assert!(!tokenizer.try_decode(&all).unwrap().is_empty());
        for id in [vocab, vocab + 1, u32::MAX] {
            assert_eq!(tokenizer.token_bytes(id), None);
            assert_eq!(tokenizer.decode(&[id, 64]), format!("\u{FFFD}{}", tokenizer.decode(&[64])));
            let e = tokenizer.try_decode(&[64, id]).unwrap_err();
            assert_eq!(e.kind(), Kind::Usage);
            assert!(e.to_string().contains(&format!("expected an id below {vocab}, found {id}")), "{e}");
        }
    }
}

#[test]
fn c27_specials_next_to_other_text() {
    for t in [real(), tiny()] {
        let eom = t.special_id("<|end_of_msg|>").unwrap();
        let plain = |s: &str| t.encode(s, false).unwrap();
        assert_eq!(t.encode(".<|end_of_msg|>", true).unwrap(), [plain("."), vec![eom]].concat());
        assert_eq!(t.encode("x<|end_of_msg|>y", true).unwrap(), [plain("x"), vec![eom], plain("y")].concat());
        assert_eq!(
            t.encode("  <|end_of_msg|> \n<|end_of_msg|>", true).unwrap(),
            [plain("  "), vec![eom], plain(" \n"), vec![eom]].concat()
        );
        // Near misses are text, and do not hide what follows them.
        for near in ["<|end_of_msg|", "<|end_of_msg >", "<|END_OF_MSG|>", "<", "<|"] {
            assert_eq!(t.encode(near, true).unwrap(), plain(near), "{near}");
            let followed = format!("{near}<|end_of_msg|>");
            assert_eq!(t.encode(&followed, true).unwrap(), [plain(near), vec![eom]].concat(), "{near}");
        }
        for s in ["中文开头 and more", "中<|end_of_msg|>", "    if x:\n        return y\n", "\tfoo();\n\n\t}"]
        {
            let plain = plain(s);
            assert!(plain.iter().all(|&id| !t.is_special(id)));
            assert_eq!(t.decode(&plain), s);
        }
    }
    // By hand, from the released vocabulary.
    assert_eq!(real().encode(".<|end_of_msg|>", true).unwrap(), [13, 163_586]);
    assert_eq!(real().encode("x<|end_of_msg|>y", true).unwrap(), [87, 163_586, 88]);
    assert_eq!(real().encode("<|reserved_token_163592|>", true).unwrap(), [163_592]);
}

/// Strings at which the merge order of equal candidates could show: a token that splits in overlapping ways,
/// next to itself, cut short, or doubled.
#[test]
fn merges_of_equal_rank_go_left_first() {
    let oracle = tiktoken::get_encoding("kimi_k3").unwrap();
    let mut tried = 0;
    for id in (0..REAL_BASE as u32).step_by(37) {
        let Ok(token) = std::str::from_utf8(real().token_bytes(id).unwrap()) else { continue };
        if token.chars().count() < 2 || !token.chars().all(char::is_alphanumeric) {
            continue;
        }
        let mut short = token.to_owned();
        short.pop();
        for s in [format!("{token}{token}"), format!("{short}{token}"), format!("{token}{short}{short}")] {
            assert_eq!(real().encode(&s, false).unwrap(), oracle.encode(&s), "{s:?}");
            tried += 1;
        }
    }
    assert!(tried > 3_000, "{tried}");
    for s in [
        "aaaaaaa",
        "ababababa",
        "ssssssssss",
        "1111111",
        "____________",
        "nananana",
        "\u{3042}\u{3042}\u{3042}",
    ] {
        for n in 1..6 {
            let s = s.repeat(n);
            assert_eq!(real().encode(&s, false).unwrap(), oracle.encode(&s), "{s:?}");
        }
    }
}

/// The lines of the tiny rank file, changed by `change`.
fn load_changed(change: impl FnOnce(&mut Vec<String>), vocab_size: usize) -> trunkline::Result<Tokenizer> {
    let mut lines: Vec<String> =
        std::str::from_utf8(TINY_MODEL).unwrap().lines().map(str::to_owned).collect();
    change(&mut lines);
    Tokenizer::from_bytes(lines.join("\n").as_bytes(), Path::new("m/tiktoken.model"), None, vocab_size)
}

#[test]
fn damaged_rank_files_are_refused_with_the_line() {
    type Change = fn(&mut Vec<String>);
    let cases: [(Change, &str); 12] = [
        (|l| l[9] = "CQ==".into(), "line 10: not a line of a rank file"),
        (|l| l[9] = "CQ== 9 9".into(), "line 10: not a line of a rank file"),
        (|l| l[9] = "C!== 9".into(), "line 10: the token is not base64"),
        (|l| l[9] = "CQ 9".into(), "line 10: the token is not base64"),
        (|l| l[9] = " 9".into(), "line 10: the token is empty"),
        (|l| l[9] = "CQ== nine".into(), "line 10: the rank cannot be read"),
        (|l| l[9] = "CQ== -9".into(), "line 10: the rank cannot be read"),
        (
            |l| l[9] = "CQ== 8".into(),
            "line 10: a rank is given twice (m/tiktoken.model): expected each of 0..1792 once, found 8 again, first on line 9",
        ),
        (|l| l[1700] = "CQ== 1700".into(), "line 1701: a token is given twice"),
        (|l| drop(l.remove(300)), "rank 300 is missing (m/tiktoken.model): expected each of 0..1791 once"),
        (
            |l| l[9] = "enpxcXE= 9".into(),
            "a single byte has no token (m/tiktoken.model): expected all 256 single bytes, found none for 0x09",
        ),
        (
            |l| l.truncate(1000),
            "the vocabulary is not the model's (m/tiktoken.model, key vocab_size): expected 2048 ids",
        ),
    ];
    for (change, expected) in cases {
        let e = load_changed(change, 2048).expect_err(expected);
        assert_eq!(e.kind(), Kind::Refused, "{e}");
        assert_eq!(e.place().file.as_deref(), Some(Path::new("m/tiktoken.model")), "{e}");
        assert!(e.to_string().starts_with(expected), "{e}");
    }
    for vocab_size in [0, 1792, 2047, 2049, usize::MAX] {
        let e = load_changed(|_| (), vocab_size).expect_err("another size");
        assert_eq!(e.kind(), Kind::Refused);
        assert!(e.to_string().contains("found 1792 tokens and 256 specials, 2048 ids"), "{e}");
    }
    let e = Tokenizer::from_bytes(b"", Path::new("empty"), None, 256).expect_err("no tokens");
    assert!(e.to_string().contains("none for 0x00 in 0 tokens"), "{e}");
}

#[test]
fn rank_files_may_be_shuffled_and_end_lines_either_way() {
    let shuffled = load_changed(|l| l.reverse(), 2048).unwrap();
    let windows = load_changed(|l| l.iter_mut().for_each(|s| s.push_str("\r\n\r")), 2048).unwrap();
    for s in ["Shall I compare thee to a summer's day?", "中文 🚀\n"] {
        assert_eq!(shuffled.encode(s, true).unwrap(), tiny().encode(s, true).unwrap());
        assert_eq!(windows.encode(s, true).unwrap(), tiny().encode(s, true).unwrap());
    }
    // Without a configuration no special has a name.
    assert_eq!(shuffled.special_id("<|end_of_msg|>"), None);
    assert_eq!(shuffled.special_id("<|reserved_token_1794|>"), Some(1794));
}

#[test]
fn damaged_tokenizer_configurations_are_refused_with_the_key() {
    let load = |json: &str| {
        let config = Some((json.as_bytes(), Path::new("tokenizer_config.json")));
        Tokenizer::from_bytes(TINY_MODEL, Path::new("tiktoken.model"), config, 2048)
    };
    let entry =
        |id: &str, name: &str| format!(r#"{{"added_tokens_decoder":{{"{id}":{{"content":"{name}"}}}}}}"#);
    for (json, expected) in [
        ("{".to_owned(), "cannot read the tokenizer configuration"),
        (r#"{"added_tokens_decoder":[]}"#.to_owned(), "cannot read the tokenizer configuration"),
        (entry("1791", "x"), "key added_tokens_decoder.1791): expected 1792..2048, found 1791"),
        (entry("2048", "x"), "key added_tokens_decoder.2048"),
        (entry("bos", "x"), "key added_tokens_decoder.bos"),
        (entry("1793", ""), "a special token has an empty name"),
        (entry("1793", "<|reserved_token_1792|>"), "a special name stands for two ids"),
        (
            r#"{"added_tokens_decoder":{"1792":{"content":"a"},"01792":{"content":"b"}}}"#.to_owned(),
            "a special id is named twice",
        ),
    ] {
        let e = load(&json).expect_err(&json);
        assert_eq!(e.kind(), Kind::Refused);
        assert_eq!(e.place().file.as_deref(), Some(Path::new("tokenizer_config.json")), "{e}");
        assert!(e.to_string().contains(expected), "{e}");
    }
    assert!(load("{}").is_ok());
}

/// The tiny vocabulary as a `tokenizer.json`, changed by `change`.
fn tiny_json(change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let spell = |bytes: &[u8]| -> String {
        bytes
            .iter()
            .map(|&b| match printable(b) {
                true => char::from(b),
                false => char::from_u32(256 + (0..b).filter(|&x| !printable(x)).count() as u32).unwrap(),
            })
            .collect()
    };
    let tokens: Vec<&[u8]> = (0..1792).map(|id| tiny().token_bytes(id).unwrap()).collect();
    let vocab: serde_json::Map<String, Value> =
        tokens.iter().enumerate().map(|(id, t)| (spell(t), id.into())).collect();
    let rank = |t: &[u8]| tokens.iter().position(|&x| x == t);
    let mut merges = Vec::new();
    for t in &tokens {
        let mut splits: Vec<_> = (1..t.len())
            .filter_map(|i| Some((rank(&t[..i])?, rank(&t[i..])?, [spell(&t[..i]), spell(&t[i..])])))
            .collect();
        splits.sort();
        merges.extend(splits.into_iter().map(|s| s.2));
    }
    let added: Vec<Value> = [1794u32, 1795, 1796, 1797]
        .iter()
        .map(|&id| {
            serde_json::json!({ "id": id, "content": tiny().decode(&[id]), "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false, "special": true })
        })
        .collect();
    let byte_level = serde_json::json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false,
        "use_regex": false });
    let mut json = serde_json::json!({
        "version": "1.0",
        "truncation": { "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0 },
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
            { "type": "Split", "pattern": { "Regex": text(vectors(), "pattern") }, "behavior": "Isolated",
              "invert": false },
            byte_level.clone(),
        ] },
        "post_processor": null,
        "decoder": byte_level,
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": true,
            "vocab": vocab, "merges": merges },
    });
    change(&mut json);
    json.to_string().into_bytes()
}

#[test]
fn a_tokenizer_json_gives_the_same_ids() {
    let t = Tokenizer::from_json(&tiny_json(|_| ()), Path::new("tokenizer.json"), 2048).unwrap();
    assert_eq!(t.vocab_size(), 2048);
    for case in list(tiny_vectors(), "texts") {
        let s = text(case, "text");
        assert_eq!(t.encode(s, false).unwrap(), ids(&case["ids"]), "{s:?}");
        assert_eq!(t.decode(&ids(&case["ids"])), s);
    }
    let marked = "a<|open|>b <|close|>";
    assert_eq!(t.encode(marked, true).unwrap(), tiny().encode(marked, true).unwrap());
    assert_eq!(t.encode(marked, false).unwrap(), tiny().encode(marked, false).unwrap());
    assert_eq!(t.special_id("<|open|>"), Some(1795));
    // Ids between the vocabulary and the specials, and after them, have no bytes.
    assert!(t.is_special(1795) && !t.is_special(1792));
    for hole in [1792, 1793, 1798, 2047] {
        assert_eq!(t.token_bytes(hole), None);
        assert_eq!(t.decode(&[hole]), "\u{FFFD}");
    }
}

#[test]
fn a_tokenizer_json_of_another_kind_is_refused() {
    type Change = fn(&mut Value);
    let cases: [(Change, &str); 11] = [
        (|j| j["added_tokens"][1]["id"] = 1794.into(), "its id is taken"),
        (|j| j["added_tokens"][1]["content"] = "<|close|>".into(), "a special name stands for two ids"),
        (|j| j["added_tokens"][3]["special"] = false.into(), "expected 1797, found 1795"),
        (
            |j| j["model"] = serde_json::json!({ "type": "WordLevel", "vocab": {}, "unk_token": "?" }),
            "key model.type",
        ),
        (|j| j["model"]["dropout"] = 0.5.into(), "key model.dropout"),
        (|j| j["pre_tokenizer"] = Value::Null, "key pre_tokenizer"),
        (|j| j["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = true.into(), "key pre_tokenizer"),
        (|j| j["added_tokens"][0]["lstrip"] = true.into(), "key added_tokens.<|end_of_msg|>"),
        (|j| j["model"]["vocab"]["☃"] = 1792.into(), "not spelled in byte characters"),
        (|j| j["model"]["vocab"]["!"] = 40_000.into(), "expected ids below 2048, found 40000"),
        (|j| j["model"] = Value::Null, "cannot read the tokenizer"),
    ];
    for (change, expected) in cases {
        let e =
            Tokenizer::from_json(&tiny_json(change), Path::new("tokenizer.json"), 2048).expect_err(expected);
        assert_eq!(e.kind(), Kind::Refused);
        assert_eq!(e.place().file.as_deref(), Some(Path::new("tokenizer.json")));
        assert!(e.to_string().contains(expected), "{e}");
    }
    assert!(Tokenizer::from_json(b"", Path::new("tokenizer.json"), 2048).is_err());
}

/// Streams `ids` and returns every piece released, the last one at the end.
fn stream(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
    let mut decoder = StreamDecoder::new();
    let mut pieces: Vec<String> = ids.iter().map(|&id| decoder.push(tokenizer, id)).collect();
    pieces.push(decoder.finish());
    pieces
}

#[test]
fn c29_a_character_split_over_tokens_is_released_whole() {
    // Ids 0..256 of the tiny vocabulary are the single bytes.
    let smile = [0xF0, 0x9F, 0x98, 0x8A];
    assert_eq!(stream(tiny(), &smile), ["", "", "", "😊", ""]);
    for max_tokens in 1..4 {
        let cut = &smile[..max_tokens];
        let pieces = stream(tiny(), cut);
        assert!(pieces[..max_tokens].iter().all(String::is_empty));
        assert_eq!(pieces.concat(), "\u{FFFD}");
        assert_eq!(pieces.concat(), tiny().decode(cut));
    }
    // An unfinished character gives way as soon as the next byte shows that it will not be one.
    assert_eq!(stream(tiny(), &[0xF0, 0x9F, 0x41]), ["", "", "\u{FFFD}A", ""]);
    assert_eq!(stream(tiny(), &[0xFF, 0xC3]), ["\u{FFFD}", "", "\u{FFFD}"]);
    assert_eq!(stream(tiny(), &[0xE4, 5_000, 0xB8]), ["", "\u{FFFD}\u{FFFD}", "\u{FFFD}", ""]);
    for case in list(vectors(), "completions") {
        let ids = ids(&case["ids"]);
        assert_eq!(stream(real(), &ids).concat(), text(case, "text"), "{}", case["name"]);
    }
}

/// Pushes `pieces` and returns what was released and the stop that matched, if one did.
fn run_matcher(stops: &[String], pieces: &[&str]) -> (String, Option<usize>) {
    let mut matcher = StopMatcher::new(stops).unwrap();
    let mut released = String::new();
    for piece in pieces {
        let StopStep { text, stopped } = matcher.push(piece);
        released.push_str(&text);
        if stopped.is_some() {
            assert_eq!(matcher.push("more"), StopStep { text: String::new(), stopped });
            assert_eq!(matcher.finish(), "", "nothing is released after a stop");
            return (released, stopped);
        }
    }
    released.push_str(&matcher.finish());
    (released, None)
}

#[test]
fn c30_stop_strings_span_tokens() {
    let step = |text: &str, stopped| StopStep { text: text.into(), stopped };
    let mut m = StopMatcher::new(&["DEF"]).unwrap();
    assert_eq!(m.push("abc"), step("abc", None));
    assert_eq!(m.push("xD"), step("x", None));
    assert_eq!(m.push("E"), step("", None));
    assert_eq!(m.push("F!"), step("", Some(0)));

    let mut m = StopMatcher::new(&["DEF"]).unwrap();
    assert_eq!(m.push("D"), step("", None));
    assert_eq!(m.push("E"), step("", None));
    assert_eq!(m.push("X"), step("DEX", None), "a near miss is released at once");
    assert_eq!(m.push("DE"), step("", None));
    assert_eq!(m.finish(), "DE", "what is held at the end was not a stop");
    assert_eq!(m.finish(), "", "and is released once");

    let run = |stops: &[&str], pieces: &[&str]| {
        let stops: Vec<String> = stops.iter().map(|s| s.to_string()).collect();
        run_matcher(&stops, pieces)
    };
    assert_eq!(run(&["DEF"], &["DDEF"]), ("D".into(), Some(0)));
    assert_eq!(run(&["aab"], &["aa", "ab"]), ("a".into(), Some(0)), "a match that starts inside a miss");
    assert_eq!(run(&["xyz", "b"], &["abc xyz"]), ("a".into(), Some(1)), "the earliest wins");
    assert_eq!(run(&["abcde", "cd"], &["abcde"]), ("ab".into(), Some(1)), "the first to be complete wins");
    assert_eq!(run(&["bc", "abc"], &["xabc"]), ("x".into(), Some(1)), "then the longest");
    assert_eq!(run(&["终止"], &["好终", "止了"]), ("好".into(), Some(0)));
    assert_eq!(run(&["é"], &["è", "ê"]), ("èê".into(), None), "half a character is not held back");
    assert_eq!(run(&[], &["any", "thing"]), ("anything".into(), None));
    assert_eq!(StopMatcher::new(&["ok", ""]).unwrap_err().kind(), Kind::Usage);
}

/// By definition: grow the text a byte at a time until it ends with a stop.
fn naive_stop(stops: &[String], text: &str) -> (String, Option<usize>) {
    for end in 0..=text.len() {
        let found = (0..stops.len())
            .filter(|&n| text.as_bytes()[..end].ends_with(stops[n].as_bytes()))
            .max_by_key(|&n| (stops[n].len(), std::cmp::Reverse(n)));
        if let Some(n) = found {
            return (text[..end - stops[n].len()].to_owned(), Some(n));
        }
    }
    (text.to_owned(), None)
}

fn any_text() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<String>(),
        "[ab \\n\\t]{0,40}",
        "[\\p{Han}a-z0-9'’ \\.]{0,40}",
        "(<\\|(open|close|sep)\\|>|[a-z ]|\\PC){0,20}",
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    #[test]
    fn encoding_loses_nothing(s in any_text()) {
        for t in [real(), tiny()] {
            for specials in [false, true] {
                prop_assert_eq!(&t.try_decode(&t.encode(&s, specials).unwrap()).unwrap(), &s);
            }
            let plain = t.encode(&s, false).unwrap();
            prop_assert!(plain.iter().all(|&id| !t.is_special(id)));
        }
        prop_assert_eq!(real().encode(&s, false).unwrap(), tiktoken::get_encoding("kimi_k3").unwrap().encode(&s));
    }

    #[test]
    fn c29_streaming_equals_decoding(ids in prop::collection::vec(0u32..2060, 0..60)) {
        prop_assert_eq!(stream(tiny(), &ids).concat(), tiny().decode(&ids));
    }

    #[test]
    fn c29_streaming_bytes_equals_decoding(
        bytes in prop::collection::vec(prop_oneof![any::<u8>(), 0x80u8..0xC0, 0xE0u8..0xF8], 0..60),
        cuts in prop::collection::vec(1usize..6, 1..60),
    ) {
        let mut decoder = StreamDecoder::new();
        let (mut rest, mut released) = (bytes.as_slice(), String::new());
        for cut in cuts.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (now, later) = rest.split_at((*cut).min(rest.len()));
            released.push_str(&decoder.push_bytes(now));
            rest = later;
            let seen = &bytes[..bytes.len() - rest.len()];
            // Whole characters only, and never more than three bytes late.
            let whole = String::from_utf8_lossy(seen).into_owned();
            prop_assert!(whole.starts_with(&released));
            prop_assert!(whole[released.len()..].chars().count() <= 1);
        }
        released.push_str(&decoder.finish());
        prop_assert_eq!(released, String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn c30_stops_match_their_definition(
        stops in prop::collection::vec("[abé]{1,5}", 0..4),
        pieces in prop::collection::vec("[abcé]{0,6}", 0..12),
    ) {
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        prop_assert_eq!(run_matcher(&stops, &pieces), naive_stop(&stops, &pieces.concat()));
    }

    #[test]
    fn c30_nothing_is_held_without_need(text in "[abc]{0,30}") {
        let stop = "abab".to_owned();
        let mut m = StopMatcher::new(&[&stop]).unwrap();
        let (mut released, mut seen) = (String::new(), 0);
        for c in text.chars() {
            let step = m.push(c.encode_utf8(&mut [0; 4]));
            released.push_str(&step.text);
            if step.stopped.is_some() {
                break;
            }
            seen += c.len_utf8();
            let need = (0..stop.len()).rev().find(|&n| text[..seen].ends_with(&stop[..n])).unwrap_or(0);
            prop_assert_eq!(&released, &text[..seen - need]);
        }
    }
}
